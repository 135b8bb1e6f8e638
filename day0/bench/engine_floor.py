"""The bytes that one decode step of a native model must move, from its weights and caches; times nothing."""

from __future__ import annotations

from dataclasses import dataclass

from llm_svc.cache.storage import IndexedLayerCache, RecurrentLayerCache
from llm_svc.native_model import NativeModel


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What a step of `batch` sequences moves at least.

    `weights` are all but the routed experts, each read once, the output head included and of the embedding table the
    rows of the batch; `experts` those that the batch is expected to choose where every choice is as likely; `caches`
    the states, read and written, and the rows and index keys that attention reads.
    """

    weights: int
    experts: int
    caches: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.experts + self.caches


def step_bytes(model: NativeModel, batch: int, context_tokens: int) -> StepBytes:
    """Of a decode step at this context."""
    table = model.language_model.embed_tokens.weight
    parameters = {id(p): p for part in (model.language_model, model.lm_head) for p in part.parameters()}
    tied = table is model.lm_head.weight
    weights = sum(p.nbytes for p in parameters.values() if p is not table or tied)
    weights += batch * table[0].nbytes
    experts = 0.0
    for module in model.language_model.modules():
        packed = getattr(module, "packed", None)
        if packed is None:
            continue
        count, chosen = module.num_experts, module.config.num_experts_per_tok
        size = sum(w.codes.nbytes + w.scales.nbytes for w in (packed.gate_up, packed.down))
        experts += size * (1 - (1 - chosen / count) ** batch)
    return StepBytes(weights, round(experts), batch * _cache_bytes(model, context_tokens))


def _cache_bytes(model: NativeModel, context_tokens: int) -> int:
    """Of one sequence."""
    config = model.language_model.config
    moved = 0
    for cache in model.layers:
        if isinstance(cache, RecurrentLayerCache):
            moved += 2 * (cache.conv_state[0].nbytes + cache.delta_state[0].nbytes)
        elif isinstance(cache, IndexedLayerCache):
            moved += min(context_tokens, config.index_topk) * cache.latents[0].nbytes
            if cache.pool_keys is not None:
                moved += context_tokens // config.index_kpool * cache.pool_keys[0].nbytes
    return moved
