"""Definition of index selection on FP8 queries and keys in plain torch; it does not know how either was quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.index_select.reference import TILE_POOLS, best, chosen_positions, pool_scores, tile_up
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

GROUP_ELEMENTS = 1 << 22


def _values(bits: Tensor) -> Tensor:
    """Float32 of e4m3fn bits uint8."""
    return bits.view(torch.float8_e4m3fn).float()


def _keys(
    key_cache: Tensor, block_table: Tensor, pools: int, pools_per_block: int, width: int
) -> tuple[Tensor, Tensor]:
    """Keys `[B, pools, D]` and scales `[B, pools]`, float32, of each sequence's first pools; unknown ones are zero."""
    index = torch.arange(pools, device=key_cache.device)
    column = torch.div(index, pools_per_block, rounding_mode="floor")
    inside = column < block_table.shape[1]
    block = block_table.long()[:, column.clamp(max=block_table.shape[1] - 1)]
    unknown = (block < 0) | ~inside
    block, pool = block.clamp(min=0), index % pools_per_block
    split = pools_per_block * width
    keys = _values(key_cache[:, :split].unflatten(1, (pools_per_block, width))[block, pool])
    scales = key_cache[:, split:].contiguous().view(torch.float32)[block, pool]
    return keys.masked_fill(unknown[..., None], 0), scales.masked_fill(unknown, 0)


def fp8_index_select_prefill(
    q: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    always_tail: bool,
) -> Tensor:
    """Positions each token attends to, int32 `[T, topk_tokens + pool_size - 1]` (`[T, topk_tokens]` without the tail).

    `q` uint8 `[T, HI, D]` e4m3fn bits, `weights` float32 `[T, HI]` with the queries' scales and the softmax scale in
    them, `key_cache` uint8 `[num_blocks, block_size / pool_size * (D + 4)]` (of a block all keys' bits, then all
    float32 scales), `block_table` int32 `[B, max_blocks]`, `cu_seqlens` int32 `[B + 1]`, `start_positions` int32
    `[B]`. The pools of this call's own tokens are in the cache already. Formula: DeepSeek-V3.2's indexer as DeepGEMM
    computes it; ties go to the lowest position.
    """
    device, per_block = q.device, block_size // pool_size
    width = topk_tokens + (pool_size - 1 if always_tail else 0)
    out = torch.full((len(q), width), -1, dtype=torch.int32, device=device)
    bounds, starts = cu_seqlens.tolist(), start_positions.tolist()
    for b, start in enumerate(starts):
        first, last = bounds[b], bounds[b + 1]
        if first == last:
            continue
        lengths = torch.arange(start + 1, start + last - first + 1, device=device)
        pools = max(tile_up((start + last - first) // pool_size), TILE_POOLS)
        keys, scales = _keys(key_cache, block_table[b : b + 1], pools, per_block, q.shape[2])
        step = max(1, GROUP_ELEMENTS // (q.shape[1] * TILE_POOLS))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            scores = pool_scores(_values(q[begin:end]), weights[begin:end], keys, 1.0) * scales
            length = lengths[begin - first : end - first]
            chosen = best(scores, torch.div(length, pool_size, rounding_mode="floor"), topk_tokens // pool_size)
            out[begin:end] = chosen_positions(chosen, length, pool_size, topk_tokens, always_tail)
    return out


def fp8_index_select_decode(
    q: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    always_tail: bool,
) -> Tensor:
    """One query per sequence: `q` uint8 `[B, HI, D]`, `weights` float32 `[B, HI]`, `seq_lens` int32 `[B]`.

    A length counts this token. Returns what `fp8_index_select_prefill` returns for the last token of each sequence; a
    length of 0 (padding) gives -1.
    """
    lengths = seq_lens.long()
    pools = max(tile_up(int(lengths.max()) // pool_size), TILE_POOLS) if len(q) else TILE_POOLS
    keys, scales = _keys(key_cache, block_table, pools, block_size // pool_size, q.shape[2])
    scores = pool_scores(_values(q), weights, keys, 1.0) * scales
    chosen = best(scores, torch.div(lengths, pool_size, rounding_mode="floor"), topk_tokens // pool_size)
    return chosen_positions(chosen, lengths, pool_size, topk_tokens, always_tail)
