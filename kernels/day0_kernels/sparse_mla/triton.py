"""Sparse latent attention on an NVIDIA GPU; device code is in `_triton_*`, tiles and runs in `sm_*.json`.

It does not know who chose the positions. Products take operands of the dtype of the call and sum in float32. Latents of
512 value columns have kernels of their own on Hopper (`_hopper`); everything else has those of `_triton_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.sparse_mla import _hopper
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

LARGEST_HEADS = 128
LARGEST_VALUE_DIM = 512
LARGEST_TAIL = 64
# Chosen by heads alone: with other tiles or runs by batch a query would have other bits beside other queries.
_PLAIN = {"BLOCK_H": 16, "BLOCK_W": 32, "STAGES": 2, "SPLIT_POSITIONS": 512, "num_warps": 4}
# Products of float32 run outside the tensor cores and their tiles are twice as large.
_EXACT = {"BLOCK_H": 16, "BLOCK_W": 16, "STAGES": 1, "SPLIT_POSITIONS": 512, "num_warps": 8}
_OWN = {"BLOCK_T": 64, "BLOCK_B": 64, "num_warps": 4}


def _limit(heads: int, width: int, value_dim: int) -> str | None:
    if heads > LARGEST_HEADS:
        return f"H must be at most {LARGEST_HEADS}, is {heads}"
    if value_dim > LARGEST_VALUE_DIM:
        return f"value_dim must be at most {LARGEST_VALUE_DIM}, is {value_dim}"
    if not 0 <= width - value_dim <= LARGEST_TAIL:
        return f"R must be value_dim to value_dim + {LARGEST_TAIL}, is {width} with value_dim {value_dim}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    value_dim = sizes.get("V", sizes.get("R", 1))
    return _limit(sizes.get("H", 1), sizes.get("R", value_dim), value_dim) or device_refusal(device)


def _power_of_two(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


def sparse_mla_decode(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """As the reference; the positions in runs that do not wait for each other, then a launch that joins them."""
    return _attend(q, latents, topk_indices, block_table, None, None, block_size, softmax_scale, value_dim)


def sparse_mla_prefill(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """As the reference, in two launches: whose each token is, and one that goes over its positions once."""
    return _attend(q, latents, topk_indices, block_table, cu_seqlens, None, block_size, softmax_scale, value_dim)


def sparse_mla_sinks_decode(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    sinks: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """As `sparse_mla_decode`, with a sink per head."""
    return _attend(q, latents, topk_indices, block_table, None, sinks, block_size, softmax_scale, value_dim)


def sparse_mla_sinks_prefill(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """As `sparse_mla_prefill`, with a sink per head."""
    return _attend(q, latents, topk_indices, block_table, cu_seqlens, sinks, block_size, softmax_scale, value_dim)


def _attend(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """ValueError where a size is beyond the kernels, a dtype differs or the cache has gaps."""
    from day0_kernels.sparse_mla._triton_kernels import attend, join, own

    rows, heads, width = q.shape
    positions = topk_indices.shape[1]
    beyond = _limit(heads, width, value_dim)
    if beyond is not None:
        raise ValueError(beyond)
    if latents.dtype != q.dtype or latents.shape[1] != width or not latents.is_contiguous():
        raise ValueError(
            f"latents must be contiguous {q.dtype} [slots, {width}], is {latents.dtype} {tuple(latents.shape)} with "
            f"strides {latents.stride()}"
        )
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous float32 [{heads}], is {sinks.dtype} {tuple(sinks.shape)}")
    out = torch.empty(rows, heads, value_dim, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    q, topk_indices = q.contiguous(), topk_indices.contiguous()
    owners = None
    if cu_seqlens is not None:
        owners = torch.empty(rows, dtype=torch.int32, device=q.device)
        own[(-(-rows // _OWN["BLOCK_T"]),)](cu_seqlens, owners, rows, len(cu_seqlens) - 1, **_OWN)
    if _hopper.serves(q, latents, value_dim):
        _hopper.attend(q, latents, topk_indices, block_table, owners, sinks, out, block_size, softmax_scale)
        return out
    chosen = dict(_EXACT)
    if q.dtype != torch.float32:
        chosen = dict(configuration(__file__, q.device, "attend", heads, _PLAIN))
    split, tile = chosen.pop("SPLIT_POSITIONS"), chosen["BLOCK_W"]
    tiles = -(-positions // tile)
    # A few positions behind a multiple (the tail of a selection) make no run of their own.
    wanted = max(1, round(positions / split)) if cu_seqlens is None else 1
    run_tiles = max(1, -(-tiles // wanted))
    runs = max(1, -(-tiles // run_tiles))
    block_v = _power_of_two(value_dim, 16)
    parts, peaks, totals = out, out, out
    if runs > 1:
        parts = torch.empty(rows, runs, heads, value_dim, dtype=torch.float32, device=q.device)
        peaks = torch.empty(rows, runs, heads, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(peaks)
    attend[(rows, -(-heads // chosen["BLOCK_H"]), runs)](
        q,
        latents,
        topk_indices,
        block_table,
        block_table if owners is None else owners,
        parts,
        peaks,
        totals,
        out if sinks is None else sinks,
        positions,
        run_tiles * tile,
        block_table.stride(0),
        softmax_scale,
        PACKED=owners is not None,
        SPLIT=runs > 1,
        SINKS=sinks is not None,
        BLOCK_SIZE=block_size,
        H=heads,
        R=width,
        V=value_dim,
        BLOCK_V=block_v,
        BLOCK_TAIL=_power_of_two(width - value_dim, 16) if width > value_dim else 0,
        **chosen,
    )
    if runs > 1:
        join[(rows, heads)](
            parts,
            peaks,
            totals,
            out if sinks is None else sinks,
            out,
            SINKS=sinks is not None,
            H=heads,
            V=value_dim,
            RUNS=runs,
            BLOCK_RUNS=_power_of_two(runs),
            BLOCK_V=block_v,
            num_warps=4,
        )
    return out
