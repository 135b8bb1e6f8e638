"""The native tier: packed batches through an adopted definition, with block caches and state slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from day0_kernels.workspace import Workspace
from llm_svc.adopt.operators import Operators
from llm_svc.adopt.packed_product import PackedProduct
from llm_svc.cache.storage import LayerCache, RecurrentLayerCache
from llm_svc.core import Batch, Sequence
from llm_svc.embeddings import batch_embeddings
from llm_svc.expert_residency import ExpertCounts
from llm_svc.forward_context import ForwardContext, forward_context
from llm_svc.model_runner import ModelFacts

DELTA_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class NativeModel:
    """An adopted definition and what it runs on.

    `language_model` maps embeddings [1, T, hidden] to hidden states, `lm_head` those to logits; `layer_types` are the
    names under which upstream wants its masks (we mask nothing: the operators know each token's place). `workspace` is
    the arena of all scratch, None where nothing needs any.
    """

    language_model: Any
    lm_head: Any
    layer_types: frozenset[str]
    operators: Operators
    packed_product: PackedProduct
    workspace: Workspace | None
    layers: tuple[LayerCache, ...]
    block_size: int
    device: torch.device


class NativeRunner:
    """Builds the index tensors of a batch, runs one forward, and keeps the recurrent states in step."""

    def __init__(self, model: NativeModel, facts: ModelFacts) -> None:
        self.facts = facts
        self.workspace = model.workspace
        self.expert_counts: ExpertCounts = model.packed_product.counts
        self._model = model
        self._recurrent = [cache for cache in model.layers if isinstance(cache, RecurrentLayerCache)]
        self._delta_chunk = min(DELTA_CHUNK_TOKENS, model.block_size)
        if model.block_size % self._delta_chunk:
            raise ValueError(f"block_size {model.block_size} must divide or be a multiple of {DELTA_CHUNK_TOKENS}")

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits float32 [number of `batch.sampled`, vocab_size], in their order."""
        model = self._model
        self._prepare_states(batch)
        embeddings = batch_embeddings(model.language_model.embed_tokens, batch, model.device)
        with forward_context(self._context(batch)):
            hidden = model.language_model(
                inputs_embeds=embeddings[None],
                position_ids=self._positions(batch)[None],
                attention_mask=dict.fromkeys(model.layer_types),
                use_cache=False,
            ).last_hidden_state[0]
        self._save_states(batch)
        last_rows = self._last_rows(batch)
        return model.lm_head(hidden[last_rows]).float() if last_rows else hidden.new_empty(0, self.facts.vocab_size)

    def forget(self, sequence: Sequence) -> None:
        """Nothing is held per sequence besides blocks and slots."""

    def _prepare_states(self, batch: Batch) -> None:
        for item in batch.items:
            slot = item.sequence.state_slot
            assert slot is not None
            for cache in self._recurrent:
                if item.restore is not None:
                    cache.restore(slot, item.restore)
                elif item.fresh:
                    cache.clear(slot)

    def _save_states(self, batch: Batch) -> None:
        for item in batch.items:
            if item.save is not None and item.sequence.state_slot is not None:
                for cache in self._recurrent:
                    cache.save(item.sequence.state_slot, item.save)

    def _positions(self, batch: Batch) -> torch.Tensor:
        positions: list[int] = []
        for item in batch.items:
            positions.extend(range(item.start, item.start + item.count))
        return torch.tensor(positions, device=self._model.device)

    def _last_rows(self, batch: Batch) -> list[int]:
        rows, end = [], 0
        for item in batch.items:
            end += item.count
            if item.samples:
                rows.append(end - 1)
        return rows

    def _context(self, batch: Batch) -> ForwardContext:
        model, items, size = self._model, batch.items, self._model.block_size
        num_decodes = sum(item.decodes for item in items)
        assert all(item.decodes for item in items[:num_decodes]), "decode steps come first"
        width = max(len(item.sequence.blocks) for item in items)
        table = [item.sequence.blocks + [-1] * (width - len(item.sequence.blocks)) for item in items]
        slots: list[int] = []
        cu_seqlens = [0]
        for item in items:
            blocks = item.sequence.blocks
            slots.extend(blocks[p // size] * size + p % size for p in range(item.start, item.start + item.count))
            cu_seqlens.append(cu_seqlens[-1] + item.count)

        def int32(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=model.device)

        return ForwardContext(
            operators=model.operators,
            packed_product=model.packed_product,
            layers=model.layers,
            block_size=size,
            delta_chunk_tokens=self._delta_chunk,
            num_decodes=num_decodes,
            num_tokens=batch.tokens,
            slot_mapping=int32(slots),
            block_table=int32(table),
            cu_seqlens=int32(cu_seqlens),
            start_positions=int32([item.start for item in items]),
            state_slots=int32([item.sequence.state_slot for item in items]),
            decode_seq_lens=int32([item.start + 1 for item in items[:num_decodes]]),
            prefill_cu_seqlens=int32([c - num_decodes for c in cu_seqlens[num_decodes:]]),
        )
