"""Definition of sparse latent attention over an FP8 cache in plain torch; it does not know who wrote the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.packed import sequence_of_token, slots_of_positions
from day0_kernels.sparse_mla import reference as latent_attention
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

GROUP = 128
GROUP_ELEMENTS = 1 << 22


def widened(rows: Tensor, value_dim: int) -> Tensor:
    """Latents float32 `[N, R]` of cache rows uint8 `[N, value_dim + 4 * value_dim / 128 + 2 * (R - value_dim)]`.

    A row is `value_dim` e4m3fn codes, a float32 scale for each 128 of them, then R - value_dim bfloat16 values; the
    floats are in the machine's byte order. The layout of FlashMLA and vLLM (656 bytes for 512 + 64).
    """
    scales_end = value_dim + value_dim // GROUP * 4
    codes = rows[:, :value_dim].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, value_dim:scales_end].contiguous().view(torch.float32)
    tail = rows[:, scales_end:].contiguous().view(torch.bfloat16).float()
    return torch.cat([codes * scales.repeat_interleave(GROUP, 1), tail], 1)


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
    """Attention of `q [T, H, R]` over chosen rows of `cache` uint8 `[S, bytes]` -> `[T, H, value_dim]` in q's dtype.

    `topk_indices` int32 `[T, W]` are positions within the token's own sequence, -1 ignored (a row with none gives
    zeros); `block_table` int32 `[B, max_blocks]`; `cu_seqlens` int32 `[B + 1]`. Rows are as `widened` says; keys are
    whole latents, values their first `value_dim` columns. Causality is the chooser's duty.
    """
    out = q.new_empty(*q.shape[:2], value_dim)
    sequence = sequence_of_token(cu_seqlens, len(q))
    step = max(1, GROUP_ELEMENTS // (topk_indices.shape[1] * q.shape[2]))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        out[part] = fp8_sparse_mla_decode(
            q[part],
            cache,
            topk_indices[part],
            block_table[sequence[part]],
            block_size=block_size,
            softmax_scale=softmax_scale,
            value_dim=value_dim,
        )
    return out


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
    """One query per sequence: `q [B, H, R]`, `topk_indices` int32 `[B, W]` -> `[B, H, value_dim]`."""
    rows, width = topk_indices.shape
    ignored = topk_indices < 0
    slots = slots_of_positions(topk_indices.long().clamp(min=0), block_table, block_size).masked_fill(ignored, 0)
    # What was chosen, as a cache of its own: row n is block n of `width` tokens.
    chosen = widened(cache.index_select(0, slots.view(-1)), value_dim)
    places = torch.arange(width, dtype=torch.int32, device=q.device).expand(rows, width).masked_fill(ignored, -1)
    return latent_attention.sparse_mla_decode(
        q,
        chosen,
        places,
        torch.arange(rows, dtype=torch.int32, device=q.device)[:, None],
        block_size=width,
        softmax_scale=softmax_scale,
        value_dim=value_dim,
    )
