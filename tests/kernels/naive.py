"""Second definitions of every operator, float64 and one token at a time, from the README formulas alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.kernels import naive_experts, naive_fp8_rows, naive_gates, naive_paged, naive_residual

Results = dict[str, Tensor]


def _owner(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(sequence, index within the call) of each packed token."""
    bounds = cu_seqlens.tolist()
    return [(b, i) for b in range(len(bounds) - 1) for i in range(bounds[b + 1] - bounds[b])]


def _slot(block_table: Tensor, b: int, position: int, block_size: int) -> int:
    block = int(block_table[b, position // block_size])
    assert block >= 0
    return block * block_size + position % block_size


def kv_store(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> Results:
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            cache[slot] = rows[t]
    return {"cache": cache}


def index_pool(
    keys: Tensor,
    gates: Tensor,
    ape: Tensor,
    tail: Tensor,
    pool_cache: Tensor,
    state_slots: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    block_size: int,
) -> Results:
    pool, bounds = len(ape), cu_seqlens.tolist()
    seen = tail.clone()
    for t, (b, i) in enumerate(_owner(cu_seqlens)):
        slot = int(state_slots[b])
        if slot == -1:
            continue
        position = int(start_positions[b]) + i
        length = int(start_positions[b]) + bounds[b + 1] - bounds[b]
        seen[slot, position % pool] = torch.stack([keys[t], gates[t]])
        if position >= length - length % pool:
            tail[slot, position % pool] = seen[slot, position % pool]
        if position % pool == pool - 1:
            weight = torch.softmax(seen[slot, :, 1] + ape, 0)
            row = _slot(block_table, b, position, block_size) // pool
            pool_cache[row] = (weight * seen[slot, :, 0]).sum(0)
    return {"tail": tail, "pool_cache": pool_cache}


def _select(
    q: Tensor, weights: Tensor, pool_cache: Tensor, block_table: Tensor, b: int, length: int, scalars: Mapping[str, Any]
) -> list[int]:
    pool, block_size = scalars["pool_size"], scalars["block_size"]
    scored = []
    for p in range(length // pool):
        key = pool_cache[_slot(block_table, b, p * pool, block_size) // pool]
        dots = torch.relu((q @ key) * scalars["softmax_scale"])
        scored.append((-float(weights @ dots), p))
    chosen = sorted(p for _, p in sorted(scored)[: scalars["topk_tokens"] // pool])
    positions = [p * pool + j for p in chosen for j in range(pool)]
    if scalars["always_tail"]:
        positions += range(length // pool * pool, length)
    width = scalars["topk_tokens"] + (pool - 1 if scalars["always_tail"] else 0)
    return positions + [-1] * (width - len(positions))


def _width(scalars: Mapping[str, Any]) -> int:
    return scalars["topk_tokens"] + (scalars["pool_size"] - 1 if scalars["always_tail"] else 0)


def index_select_prefill(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    **scalars: Any,
) -> Results:
    rows = [
        _select(q[t], weights[t], pool_cache, block_table, b, int(start_positions[b]) + i + 1, scalars)
        for t, (b, i) in enumerate(_owner(cu_seqlens))
    ]
    return {"topk_indices": torch.tensor(rows, dtype=torch.int32).view(len(q), _width(scalars))}


def index_select_decode(
    q: Tensor, weights: Tensor, pool_cache: Tensor, block_table: Tensor, seq_lens: Tensor, **scalars: Any
) -> Results:
    rows = [
        _select(q[b], weights[b], pool_cache, block_table, b, length, scalars)
        for b, length in enumerate(seq_lens.tolist())
    ]
    return {"topk_indices": torch.tensor(rows, dtype=torch.int32).view(len(q), _width(scalars))}


def _fp8_select(
    q: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, b: int, length: int, scalars: Mapping[str, Any]
) -> list[int]:
    """As `_select` on the values that the bytes of each block stand for."""
    per_block, width = scalars["block_size"] // scalars["pool_size"], q.shape[1]
    rows = []
    for block in key_cache:
        for i in range(per_block):
            key = block[i * width : (i + 1) * width].view(torch.float8_e4m3fn).double()
            at = per_block * width + 4 * i
            rows.append(key * block[at : at + 4].clone().view(torch.float32).double())
    values = q.view(torch.float8_e4m3fn).double()
    return _select(values, weights, torch.stack(rows), block_table, b, length, {**scalars, "softmax_scale": 1.0})


def fp8_index_select_prefill(
    q: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    **scalars: Any,
) -> Results:
    rows = [
        _fp8_select(q[t], weights[t], key_cache, block_table, b, int(start_positions[b]) + i + 1, scalars)
        for t, (b, i) in enumerate(_owner(cu_seqlens))
    ]
    return {"topk_indices": torch.tensor(rows, dtype=torch.int32).view(len(q), _width(scalars))}


def fp8_index_select_decode(
    q: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, seq_lens: Tensor, **scalars: Any
) -> Results:
    rows = [
        _fp8_select(q[b], weights[b], key_cache, block_table, b, length, scalars)
        for b, length in enumerate(seq_lens.tolist())
    ]
    return {"topk_indices": torch.tensor(rows, dtype=torch.int32).view(len(q), _width(scalars))}


def _attend(
    q: Tensor,
    latents: Tensor,
    chosen: list[int],
    block_table: Tensor,
    b: int,
    scalars: Mapping[str, Any],
    sinks: Tensor | None = None,
) -> Tensor:
    positions = [position for position in chosen if position != -1]
    if not positions:
        return q.new_zeros(q.shape[0], scalars["value_dim"])
    rows = torch.stack([latents[_slot(block_table, b, position, scalars["block_size"])] for position in positions])
    logits = scalars["softmax_scale"] * q @ rows.T
    if sinks is not None:
        weights = torch.softmax(torch.cat([logits, sinks.to(q)[:, None]], 1), -1)[:, :-1]
    else:
        weights = torch.softmax(logits, -1)
    return weights @ rows[:, : scalars["value_dim"]]


def sparse_mla_prefill(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None = None,
    **scalars: Any,
) -> Results:
    out = q.new_zeros(*q.shape[:2], scalars["value_dim"])
    for t, (b, _) in enumerate(_owner(cu_seqlens)):
        out[t] = _attend(q[t], latents, topk_indices[t].tolist(), block_table, b, scalars, sinks)
    return {"out": out}


def sparse_mla_decode(
    q: Tensor, latents: Tensor, topk_indices: Tensor, block_table: Tensor, sinks: Tensor | None = None, **scalars: Any
) -> Results:
    out = q.new_zeros(*q.shape[:2], scalars["value_dim"])
    for b in range(len(q)):
        out[b] = _attend(q[b], latents, topk_indices[b].tolist(), block_table, b, scalars, sinks)
    return {"out": out}


def _convolve(x: Tensor, weight: Tensor, held: Tensor, activation: str | None) -> Tensor:
    """One token; `held [C, K - 1]` is shifted in place."""
    window = torch.cat([held, x[:, None]], 1)
    held.copy_(window[:, 1:])
    y = torch.stack([(window[c] * weight[c]).sum() for c in range(len(x))])
    return y if activation is None else torch.stack([v / (1 + math.exp(-float(v))) for v in y])


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    activation: str | None,
) -> Results:
    y = torch.zeros_like(x)
    for t, (b, _) in enumerate(_owner(cu_seqlens)):
        if state_slots[b] != -1:
            y[t] = _convolve(x[t], weight, conv_state[state_slots[b]], activation)
    return {"y": y, "conv_state": conv_state}


def short_conv_decode(
    x: Tensor, weight: Tensor, conv_state: Tensor, state_slots: Tensor, activation: str | None
) -> Results:
    each = torch.arange(len(x) + 1, dtype=torch.int32)
    return short_conv_prefill(x, weight, conv_state, state_slots, each, activation)


def gated_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    l2norm_eps: float,
    chunk_size: int | None = None,
) -> Results:
    out = torch.zeros_like(v)
    for t, (b, _) in enumerate(_owner(cu_seqlens)):
        slot = int(state_slots[b])
        if slot == -1:
            continue
        for h in range(q.shape[1]):
            held = state[slot, h]
            query = scale * q[t, h] / torch.sqrt(q[t, h] @ q[t, h] + l2norm_eps)
            key = k[t, h] / torch.sqrt(k[t, h] @ k[t, h] + l2norm_eps)
            held *= torch.exp(g[t, h])[:, None]
            held += torch.outer(key, beta[t, h] * (v[t, h] - held.T @ key))
            out[t, h] = held.T @ query
    return {"out": out, "state": state}


def gated_delta_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor, **scalars: Any
) -> Results:
    each = torch.arange(len(q) + 1, dtype=torch.int32)
    return gated_delta_prefill(q, k, v, g, beta, state, state_slots, each, **scalars)


def expert_gemm(x: Tensor, weight: Tensor, expert_offsets: Tensor) -> Results:
    out = x.new_zeros(len(x), weight.shape[1])
    for i in range(len(x)):
        expert = sum(int(offset) <= i for offset in expert_offsets.tolist()) - 1
        out[i] = weight[expert] @ x[i]
    return {"out": out}


def _mxfp4_code(codes: Tensor, *place: int) -> int:
    """Code of column `place[-1]`, low nibble first."""
    byte = int(codes[(*place[:-1], place[-1] // 2)])
    return byte >> 4 if place[-1] % 2 else byte & 15


def mxfp4_expert_gemm(x: Tensor, codes: Tensor, scales: Tensor, expert_offsets: Tensor) -> Results:
    magnitude = (0, 1, 2, 3, 4, 6, 8, 12)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1).tolist()
    weight = [
        [
            [
                math.copysign(math.ldexp(magnitude[c & 7], exponent[k // 32] - 128), -1 if c & 8 else 1)
                for k, c in enumerate(row)
            ]
            for row, exponent in zip(rows, exponents, strict=True)
        ]
        for rows, exponents in zip(nibbles, scales.tolist(), strict=True)
    ]
    return expert_gemm(x, torch.tensor(weight, dtype=torch.float64), expert_offsets)


def fp8_expert_gemm(x: Tensor, weight: Tensor, block_scales: Tensor, expert_offsets: Tensor) -> Results:
    def value(bits: int) -> float:
        exponent, mantissa = bits >> 3 & 15, bits & 7
        magnitude = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
        return -magnitude if bits >> 7 else magnitude

    scales = block_scales.tolist()
    values = [
        [[value(bits) * scales[e][n // 128][k // 128] for k, bits in enumerate(row)] for n, row in enumerate(rows)]
        for e, rows in enumerate(weight.tolist())
    ]
    return expert_gemm(x, torch.tensor(values, dtype=torch.float64), expert_offsets)


def mxfp4_to_fp8(codes: Tensor, scales: Tensor, fp8: Tensor) -> Results:
    experts, rows, columns = fp8.shape
    blocks = (experts, -(-rows // 128), -(-columns // 128))
    block_scales, spans = torch.ones(blocks, dtype=torch.float64), torch.zeros(blocks, dtype=torch.int32)
    for e, i, j in ((e, i, j) for e in range(blocks[0]) for i in range(blocks[1]) for j in range(blocks[2])):
        places = [
            (e, n, k)
            for n in range(128 * i, min(128 * i + 128, rows))
            for k in range(128 * j, min(128 * j + 128, columns))
        ]
        code = {place: _mxfp4_code(codes, *place) for place in places}
        exponent = {(e, n, k): int(scales[e, n, k // 32]) - 127 for _, n, k in places}
        held = [exponent[p] for p in places if any(code[(*p[:2], p[2] // 32 * 32 + m)] & 7 for m in range(32))]
        top = max(max(held) - 6, -126) if held else 0
        spans[e, i, j] = max(held) - min(held) if held else 0
        block_scales[e, i, j] = 2.0**top if held else 1.0
        for place in places:
            # The bits of the value at 2^-6, then one doubling at a time.
            bits = (code[place] & 7) << 2
            for _ in range(exponent[place] - top + 6 if bits and spans[e, i, j] <= 14 else 0):
                bits = bits + 8 if bits >= 8 else bits * 2
            for _ in range(top - 6 - exponent[place] if bits and spans[e, i, j] <= 14 else 0):
                assert bits >= 16 or bits % 2 == 0, "rounds"
                bits = bits - 8 if bits >= 16 else bits // 2
            fp8[place] = 0x7F if spans[e, i, j] > 14 else bits | (code[place] & 8) << 4
    return {"fp8": fp8, "block_scales": block_scales, "spans": spans}


NAIVE: Mapping[str, Callable[..., Results]] = (
    {
        fn.__name__: fn
        for fn in (
            kv_store,
            index_pool,
            index_select_prefill,
            index_select_decode,
            fp8_index_select_prefill,
            fp8_index_select_decode,
            sparse_mla_prefill,
            sparse_mla_decode,
            short_conv_prefill,
            short_conv_decode,
            gated_delta_prefill,
            gated_delta_decode,
            expert_gemm,
            mxfp4_expert_gemm,
            fp8_expert_gemm,
            mxfp4_to_fp8,
        )
    }
    | {"sparse_mla_sinks_prefill": sparse_mla_prefill, "sparse_mla_sinks_decode": sparse_mla_decode}
    | naive_experts.DEFINED
    | naive_fp8_rows.DEFINED
    | naive_paged.DEFINED
    | naive_residual.DEFINED
    | naive_gates.DEFINED
)


def define(name: str, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> Results:
    """Results of operator `name` in float64 on copies of the arguments; ids keep their dtype."""
    wide = {key: value.double() if value.is_floating_point() else value.clone() for key, value in tensors.items()}
    wide = {key: value.clone() for key, value in wide.items()}
    return NAIVE[name](**wide, **scalars)
