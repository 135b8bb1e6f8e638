"""The taps of glm5_next, in the order in which a layer computes them; compares nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from day0.align.family import AlignFamily, Effect
from day0.align.probe import Place
from day0.align.recorder import find_module
from day0.align.tap import Kind, Record, Tap


def _value(key: str, part: int | None = None) -> Callable[[Record], Tensor | None]:
    def read(record: Record) -> Tensor | None:
        value = record.get(key)
        return value if value is None or part is None else value[part]

    return read


def _projected(record: Record) -> Tensor | None:
    """q, k and v side by side, [T, 3 * heads * head_dim]."""
    names = [f"self_attn.{name}_proj:out" for name in "qkv"]
    return torch.cat([record[name] for name in names], -1) if names[0] in record else None


def _convolved(record: Record) -> Tensor | None:
    found = record.get("delta:in")
    return None if found is None else torch.cat([part.flatten(2) for part in found[:3]], -1)


def _pool_keys(record: Record) -> Tensor | None:
    """Keys of the complete pools, [pools, index_head_dim]."""
    found = record.get("pools:out")
    return None if found is None else found[0][0][found[2][0]]


def _index_weights(record: Record) -> Tensor | None:
    weights = record.get("self_attn.indexer.weights_proj:out")
    return None if weights is None else weights[0].float() * weights.shape[-1] ** -0.5


def _index_scores(record: Record) -> Tensor | None:
    """Upstream's formula on upstream's own tensors: scores float32 [T, complete pools]."""
    keys, weights = _pool_keys(record), _index_weights(record)
    if keys is None or weights is None:
        return None
    q = record["self_attn.indexer.wq_b:out"][0].float().unflatten(-1, (weights.shape[-1], -1))
    return index_scores(q, weights, keys)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [T, HI, D], weights [T, HI], keys [P, D] -> scores float32 [T, P]; the formula of Glm5NextTextIndexer."""
    dots = relu(torch.einsum("thd,pd->thp", q.float(), keys.float()) * q.shape[-1] ** -0.5)
    return torch.einsum("th,thp->tp", weights.float(), dots)


def _gate_scores(record: Record) -> Tensor:
    return record["mlp.gate:out"][0].sigmoid() + record["gate bias"]


def _by_expert(key: str) -> Callable[[Record], Tensor | None]:
    """Rows of all experts, lowest expert first and its tokens in order, as `permute_rows` sorts them."""

    def read(record: Record) -> Tensor | None:
        calls = record.get(key)
        if calls is None:
            return None
        ids, rows = record["mlp.gate:out"][2], []
        for expert, found in zip(ids.unique().tolist(), calls, strict=True):
            # Upstream sorts an expert's rows by place in the choice, then by token.
            rows.append(found[torch.where((ids == expert).T)[1].argsort()])
        return torch.cat(rows)

    return read


def _latents(record: Record) -> Tensor | None:
    return record.get("latents")


def _conv_state(record: Record) -> Tensor | None:
    """Upstream keeps as many inputs as the kernel is wide; its next step reads all but the oldest: our state."""
    state = record.get("conv state")
    return None if state is None else state[0, :, 1:]


def _terms(field: str) -> Callable[[Any, int], int]:
    return lambda config, tokens: int(getattr(config, field))


def _one(config: Any, tokens: int) -> int:
    return 1


def _streams(config: Any, tokens: int) -> int:
    return int(config.hc_mult * config.hidden_size)


def _delta(config: Any, tokens: int) -> int:
    return int(config.linear_head_dim) * min(tokens, 64)


def _attended(config: Any, tokens: int) -> int:
    return int(config.kv_lora_rank) * min(tokens, int(config.index_topk))


_BEFORE_ATTENTION = (
    Tap("post weights, attention", "hc_pre_norm", "hc_pre_norm#1:out", _value("attn_hc:out", 0), _streams, 0),
    Tap("mixing weights, attention", "hc_pre_norm", "hc_pre_norm#1:out", _value("attn_hc:out", 1), _streams, 1),
    Tap("input of attention", "hc_pre_norm", "hc_pre_norm#1:out", _value("input_layernorm:out"), _streams, 2),
)

_KDA = (
    Tap("q, k, v products", "linear q_proj, k_proj, v_proj", "short_conv:in", _projected, _terms("hidden_size"), 0),
    Tap("convolved q, k, v", "short_conv", "short_conv:out", _convolved, _terms("linear_conv_kernel_dim")),
    Tap("convolution state", "short_conv", "short_conv:state", _conv_state, _one),
    Tap("decay", "delta_gates", "delta_gates:out", _value("self_attn.forget_gate:out"), _terms("hidden_size"), 0),
    Tap("beta", "delta_gates", "delta_gates:out", _value("delta:in", 4), _terms("hidden_size"), 1),
    Tap("delta output", "gated_delta", "gated_delta:out", _value("delta:out", 0), _delta),
    Tap("delta state", "gated_delta", "gated_delta:state", _value("delta:out", 1), _delta),
    Tap("gated norm", "gated_norm", "gated_norm:out", _value("self_attn.o_norm:out"), _terms("linear_head_dim")),
)

_DSA = (
    Tap("query", "linear q_b_proj", "self_attn.q_b_proj:out", _value("self_attn.q_b_proj:out"), _terms("hidden_size")),
    Tap("latent", "linear kv_a_proj", "kv_store:in", _value("self_attn.kv_a_layernorm:out"), _terms("hidden_size"), 0),
    Tap("latents in the cache", "kv_store", "kv_store:cache", _latents, _one),
    Tap("indexer keys", "linear indexer.wk", "index_pool:in", _value("self_attn.indexer.k_norm:out"), _streams, 0),
    Tap("pool keys in the cache", "index_pool", "index_pool:cache", _pool_keys, _terms("hidden_size")),
    Tap("indexer query", "linear indexer.wq_b", "index_select:in", _value("self_attn.indexer.wq_b:out"), _streams, 0),
    Tap("indexer weights", "linear indexer.weights_proj", "index_select:in", _index_weights, _streams, 1),
    Tap("indexer scores", "index_select", "index_select:scores", _index_scores, _streams),
    Tap(
        "indexer choice",
        "index_select",
        "index_select:out",
        _value("self_attn.indexer:out"),
        _streams,
        kind=Kind.CHOICE,
        scores=_index_scores,
    ),
    Tap(
        "indices attended to",
        "topk_indices handed to sparse_mla",
        "sparse_mla:in",
        _value("self_attn.indexer:out"),
        _one,
        2,
        kind=Kind.SAME_CHOICE,
    ),
    Tap("attention by head", "sparse_mla", "self_attn.o_proj:in", _value("self_attn.o_proj:in"), _attended),
)

_AFTER_ATTENTION = (
    Tap("attention output", "linear o_proj", "self_attn:out", _value("self_attn:out"), _terms("hidden_size")),
    Tap("residual streams after attention", "hc_post", "hc_post#1:out", _value("ffn_hc:in"), _terms("hc_mult")),
    Tap("post weights, feed forward", "hc_pre_norm", "hc_pre_norm#2:out", _value("ffn_hc:out", 0), _streams, 0),
    Tap("mixing weights, feed forward", "hc_pre_norm", "hc_pre_norm#2:out", _value("ffn_hc:out", 1), _streams, 1),
    Tap(
        "input of feed forward", "hc_pre_norm", "hc_pre_norm#2:out", _value("post_attention_layernorm:out"), _streams, 2
    ),
)

_MOE = (
    Tap("gate logits", "gate product", "mlp.gate:out", _value("mlp.gate:out", 0), _terms("hidden_size"), 0),
    Tap(
        "gate choice",
        "select_experts",
        "mlp.gate:out",
        _value("mlp.gate:out", 2),
        _terms("hidden_size"),
        2,
        kind=Kind.CHOICE,
        scores=_gate_scores,
    ),
    Tap(
        "gate weights",
        "select_experts",
        "mlp.gate:out",
        _value("mlp.gate:out", 1),
        _terms("hidden_size"),
        1,
        kind=Kind.BY_CHOICE,
    ),
    Tap("gate and up of experts", "expert_gemm", "expert_gemm#1:out", _by_expert("gate_up"), _terms("hidden_size")),
    Tap("gated activation of experts", "swiglu of experts", "expert_gemm#2:in", _by_expert("gated"), _one, 0),
    Tap(
        "expert output",
        "down product, unpermute_rows",
        "mlp.experts:out",
        _value("mlp.experts:out"),
        _terms("moe_intermediate_size"),
    ),
    Tap("shared expert", "shared expert", "mlp.shared_experts:out", _value("mlp.shared_experts:out"), _streams),
)

_AT_THE_END = (
    Tap("feed forward output", "feed forward", "mlp:out", _value("mlp:out"), _streams),
    Tap("residual streams", "hc_post", "hc_post#2:out", _value(":out"), _terms("hc_mult")),
)


def effects(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Iterator[Effect]:
    """What is in the caches and states of the sequence after one of our operators."""
    if operator == "kv_store":
        yield _rows("kv_store:cache", args[1], place.slots)
    elif operator == "index_pool":
        pool = args[3].shape[1]
        ends = place.slots[pool - 1 :: pool]
        yield _rows("index_pool:cache", args[4], ends // pool)
    elif operator == "index_select":
        pool = kwargs["pool_size"]
        keys = args[2][place.slots[pool - 1 :: pool] // pool]
        yield "index_select:scores", index_scores(args[0], args[1], keys), lambda value: None
    elif operator in ("gated_delta", "short_conv"):
        state = args[5] if operator == "gated_delta" else args[2]
        yield f"{operator}:state", state[place.state_slot].clone(), partial(_put, state, place.state_slot)


def _rows(key: str, cache: Tensor, slots: Tensor) -> Effect:
    return key, cache[slots], partial(_put, cache, slots)


def _put(target: Tensor, where: Any, value: Tensor) -> None:
    target[where] = value


def extras(layer: nn.Module, cache: Any, number: int) -> dict[str, Any]:
    """What upstream keeps in its cache and in the gate's buffer."""
    found: dict[str, Any] = {}
    gate = find_module(layer, "mlp.gate")
    if gate is not None:
        found["gate bias"] = gate.e_score_correction_bias
    if find_module(layer, "self_attn.kv_a_layernorm") is not None:
        found["latents"] = cache.layers[number].keys[0, 0]
    else:
        found["conv state"] = cache.get_conv_state(number, state_idx=0)
    return found


def by_choice(native: Any, record: Record) -> tuple[Tensor, Tensor]:
    """Weights of the tokens that choose the same experts on both sides, lowest expert first."""
    _, weights, ids = native
    _, their_weights, their_ids = record["mlp.gate:out"]
    order, their_order = ids.long().argsort(1), their_ids.argsort(1)
    same = (ids.long().gather(1, order) == their_ids.gather(1, their_order)).all(1)
    return weights.gather(1, order)[same], their_weights.gather(1, their_order)[same]


def taps(config: Any, layer: int) -> tuple[Tap, ...]:
    """The taps of one layer of a text config, in order."""
    attention = _KDA if config.layer_types[layer] == "linear_attention" else _with_pools(config)
    experts = _MOE if config.mlp_layer_types[layer] == "sparse" else ()
    return (*_BEFORE_ATTENTION, *attention, *_AFTER_ATTENTION, *experts, *_AT_THE_END)


def _with_pools(config: Any) -> tuple[Tap, ...]:
    return tuple(replace(tap, group=config.index_kpool) if tap.scores else tap for tap in _DSA)


FAMILY = AlignFamily(
    taps=taps,
    modules=(
        "",
        "attn_hc",
        "ffn_hc",
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn",
        *(
            f"self_attn.{name}"
            for name in ("q_proj", "k_proj", "v_proj", "forget_gate", "o_norm", "o_proj", "q_b_proj")
        ),
        "self_attn.kv_a_layernorm",
        "self_attn.indexer",
        *(f"self_attn.indexer.{name}" for name in ("k_norm", "wq_b", "weights_proj")),
        *(f"mlp{name}" for name in ("", ".gate", ".experts", ".shared_experts")),
    ),
    functions={"chunk_kimi_delta_attention": "delta", "recurrent_kimi_delta_attention": "delta"},
    methods={
        "self_attn.indexer": {"get_pooled_states": ("pools:out", None)},
        "mlp.experts": {"_apply_gate": ("gated", "gate_up")},
    },
    effects=effects,
    extras=extras,
    by_choice=by_choice,
)
