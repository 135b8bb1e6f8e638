"""Second definitions of attention over FP8 latents and over whole paged sequences, float64, a token at a time."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Tensor]


def _slot(block_table: Tensor, b: int, position: int, block_size: int) -> int:
    block = int(block_table[b, position // block_size])
    assert block >= 0
    return block * block_size + position % block_size


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code >> 7 else magnitude


def _latent(row: Tensor, value_dim: int) -> Tensor:
    """One latent from its bytes: codes, scales, then halves of float32 whose other half is zero."""
    raw = bytes(row.tolist())
    groups = value_dim // 128
    scales = struct.unpack_from(f"={groups}f", raw, value_dim)
    values = [_e4m3(code) * scales[i // 128] for i, code in enumerate(raw[:value_dim])]
    for (half,) in struct.iter_unpack("=H", raw[value_dim + 4 * groups :]):
        values += struct.unpack("=f", struct.pack("=I", half << 16))
    return torch.tensor(values, dtype=torch.float64)


def _attention(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, width: int) -> Tensor:
    """One head's query over keys; zeros where there is none."""
    if not keys:
        return q.new_zeros(width)
    weights = torch.softmax(scale * torch.stack(keys) @ q, 0)
    return weights @ torch.stack(values)


def fp8_sparse_mla_prefill(
    q: Tensor, cache: Tensor, topk_indices: Tensor, block_table: Tensor, cu_seqlens: Tensor, **scalars: Any
) -> Results:
    bounds = cu_seqlens.tolist()
    owners = [b for b in range(len(bounds) - 1) for _ in range(bounds[b + 1] - bounds[b])]
    return {"out": _fp8_sparse(q, cache, topk_indices, block_table, owners, scalars)}


def fp8_sparse_mla_decode(
    q: Tensor, cache: Tensor, topk_indices: Tensor, block_table: Tensor, **scalars: Any
) -> Results:
    return {"out": _fp8_sparse(q, cache, topk_indices, block_table, list(range(len(q))), scalars)}


def _fp8_sparse(
    q: Tensor, cache: Tensor, chosen: Tensor, block_table: Tensor, owners: list[int], scalars: Mapping[str, Any]
) -> Tensor:
    width = scalars["value_dim"]
    out = q.new_zeros(*q.shape[:2], width)
    for t, b in enumerate(owners):
        slots = [_slot(block_table, b, p, scalars["block_size"]) for p in chosen[t].tolist() if p != -1]
        latents = [_latent(cache[slot], width) for slot in slots]
        for h in range(q.shape[1]):
            out[t, h] = _attention(
                q[t, h], latents, [latent[:width] for latent in latents], scalars["softmax_scale"], width
            )
    return out


def paged_mla_decode(q: Tensor, latents: Tensor, block_table: Tensor, seq_lens: Tensor, **scalars: Any) -> Results:
    width = scalars["value_dim"]
    out = q.new_zeros(*q.shape[:2], width)
    for b, length in enumerate(seq_lens.tolist()):
        rows = [latents[_slot(block_table, b, p, scalars["block_size"])] for p in range(length)]
        for h in range(q.shape[1]):
            out[b, h] = _attention(q[b, h], rows, [row[:width] for row in rows], scalars["softmax_scale"], width)
    return {"out": out}


def paged_gqa_decode(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, **scalars: Any
) -> Results:
    out = torch.zeros_like(q)
    group = q.shape[1] // key_cache.shape[1]
    for b, length in enumerate(seq_lens.tolist()):
        slots = [_slot(block_table, b, p, scalars["block_size"]) for p in range(length)]
        for h in range(q.shape[1]):
            keys, values = ([cache[slot, h // group] for slot in slots] for cache in (key_cache, value_cache))
            out[b, h] = _attention(q[b, h], keys, values, scalars["softmax_scale"], q.shape[2])
    return {"out": out}


DEFINED = {
    fn.__name__: fn for fn in (fp8_sparse_mla_prefill, fp8_sparse_mla_decode, paged_mla_decode, paged_gqa_decode)
}
