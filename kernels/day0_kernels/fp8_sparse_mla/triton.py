"""Sparse latent attention over FP8 rows on an NVIDIA GPU; configurations are in `sm_*.json`.

512 value columns have kernels of their own on Hopper (`_hopper`); everything else has those of `_triton_kernels`. It
does not know who chose the positions. A code times its scale is computed in float32 and rounded once to the dtype of
the call; products take operands of that dtype and sum in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.fp8_sparse_mla import _hopper
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

LARGEST_HEADS = 128
VALUE_DIMS = (128, 256, 512)
LARGEST_TAIL = 64
# Chosen by heads alone: with other tiles or runs by batch a query would have other bits beside other queries.
_PLAIN = {"BLOCK_H": 16, "BLOCK_W": 32, "SPLIT_POSITIONS": 512, "num_warps": 4}
# Products of float32 run outside the tensor cores and their tiles are twice as large.
_EXACT = {"BLOCK_H": 16, "BLOCK_W": 16, "SPLIT_POSITIONS": 512, "num_warps": 8}
_OWN = {"BLOCK_T": 64, "BLOCK_B": 64, "num_warps": 4}


def _limit(heads: int, width: int, value_dim: int) -> str | None:
    if heads > LARGEST_HEADS:
        return f"H must be at most {LARGEST_HEADS}, is {heads}"
    if value_dim not in VALUE_DIMS:
        return f"value_dim must be one of {', '.join(map(str, VALUE_DIMS))}, is {value_dim}"
    if not 0 <= width - value_dim <= LARGEST_TAIL or width % 2:
        return f"R must be an even number, value_dim to value_dim + {LARGEST_TAIL}, is {width} with {value_dim}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    value_dim = sizes.get("V", VALUE_DIMS[-1])
    return _limit(sizes.get("H", 1), sizes.get("R", value_dim), value_dim) or device_refusal(device)


def row_bytes(width: int, value_dim: int) -> int:
    """Bytes of a cache row: codes, scales, tail."""
    return value_dim + value_dim // 128 * 4 + 2 * (width - value_dim)


def fp8_sparse_mla_decode(
    q: Tensor,
    cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """As the reference; the positions in runs that do not wait for each other, then a launch that joins them."""
    return _attend(q, cache, topk_indices, block_table, None, block_size, softmax_scale, value_dim)


def fp8_sparse_mla_prefill(
    q: Tensor,
    cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """As the reference, in two launches: whose each token is, and one that goes over its positions once."""
    return _attend(q, cache, topk_indices, block_table, cu_seqlens, block_size, softmax_scale, value_dim)


def _attend(
    q: Tensor,
    cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """ValueError where a size is beyond the kernels or the cache is not rows of bytes without gaps."""
    from day0_kernels.fp8_sparse_mla._triton_kernels import attend
    from day0_kernels.sparse_mla._triton_kernels import join, own

    rows, heads, width = q.shape
    positions = topk_indices.shape[1]
    beyond = _limit(heads, width, value_dim)
    if beyond is not None:
        raise ValueError(beyond)
    size = row_bytes(width, value_dim)
    if cache.dtype != torch.uint8 or cache.shape[1] != size or not cache.is_contiguous():
        raise ValueError(
            f"cache must be contiguous torch.uint8 [slots, {size}], is {cache.dtype} {tuple(cache.shape)} with strides "
            f"{cache.stride()}"
        )
    out = torch.empty(rows, heads, value_dim, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    owners = None
    if cu_seqlens is not None:
        owners = torch.empty(rows, dtype=torch.int32, device=q.device)
        own[(-(-rows // _OWN["BLOCK_T"]),)](cu_seqlens, owners, rows, len(cu_seqlens) - 1, **_OWN)
    q, topk_indices = q.contiguous(), topk_indices.contiguous()
    if _hopper.serves(q, cache, value_dim):
        _hopper.attend(q, cache, topk_indices, block_table, owners, out, block_size, softmax_scale)
        return out
    chosen = dict(_EXACT)
    if q.dtype != torch.float32:
        chosen = dict(configuration(__file__, q.device, "attend", heads, _PLAIN))
    split, tile = chosen.pop("SPLIT_POSITIONS"), chosen["BLOCK_W"]
    tiles = -(-positions // tile)
    # A few positions behind a multiple (the tail of a selection) make no run of their own.
    wanted = max(1, round(positions / split)) if owners is None else 1
    run_tiles = max(1, -(-tiles // wanted))
    runs = max(1, -(-tiles // run_tiles))
    parts, peaks, totals = out, out, out
    if runs > 1:
        parts = torch.empty(rows, runs, heads, value_dim, dtype=torch.float32, device=q.device)
        peaks = torch.empty(rows, runs, heads, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(peaks)
    attend[(rows * -(-heads // chosen["BLOCK_H"]), runs)](
        q,
        cache.view(torch.int32),
        cache.view(torch.float32),
        cache.view(torch.bfloat16),
        topk_indices,
        block_table,
        block_table if owners is None else owners,
        parts,
        peaks,
        totals,
        positions,
        run_tiles * tile,
        block_table.stride(0),
        1,
        softmax_scale,
        PACKED=owners is not None,
        SPLIT=runs > 1,
        BLOCK_SIZE=block_size,
        H=heads,
        R=width,
        V=value_dim,
        ROW_BYTES=size,
        BLOCK_TAIL=max(16, 1 << (width - value_dim - 1).bit_length()) if width > value_dim else 0,
        **chosen,
    )
    if runs > 1:
        join[(rows, heads)](
            parts,
            peaks,
            totals,
            out,
            out,
            SINKS=False,
            H=heads,
            V=value_dim,
            RUNS=runs,
            BLOCK_RUNS=1 << (runs - 1).bit_length(),
            BLOCK_V=value_dim,
            num_warps=4,
        )
    return out
