"""Definition of index selection in plain torch; it does not know how pooled keys were made."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.row_invariant import bmm
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

TILE_POOLS = 64
GROUP_ELEMENTS = 1 << 22


def _pool_keys(pool_cache: Tensor, block_table: Tensor, pools: int, pools_per_block: int) -> Tensor:
    """Keys float32 `[B, pools, D]` of each sequence's first `pools` pools; pools past its block table are zero."""
    index = torch.arange(pools, device=pool_cache.device)
    column = torch.div(index, pools_per_block, rounding_mode="floor")
    inside = column < block_table.shape[1]
    block = block_table.long()[:, column.clamp(max=block_table.shape[1] - 1)]
    known = (block >= 0) & inside
    rows = block.clamp(min=0) * pools_per_block + index % pools_per_block
    keys = pool_cache.index_select(0, rows.view(-1)).view(*rows.shape, -1).float()
    return keys.masked_fill(~known[..., None], 0)


def pool_scores(q: Tensor, weights: Tensor, keys: Tensor, softmax_scale: float) -> Tensor:
    """Scores `[N, tiles * 64]` of `q [N, HI, D]`, `weights [N, HI]` over `keys [N or 1, tiles * 64, D]`.

    Every product is `[HI, D] @ [D, 64]`, so that a pool's score has the same bits in prefill and decode, at any length.
    """
    count, _, width = q.shape
    parts = []
    for start in range(0, keys.shape[1], TILE_POOLS):
        tile = keys[:, start : start + TILE_POOLS].transpose(1, 2).expand(count, width, TILE_POOLS)
        dots = bmm(q, tile).mul_(softmax_scale).relu_()
        parts.append(bmm(weights[:, None], dots)[:, 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def best(scores: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Pools int64 `[N, min(count, P)]`, ascending: the highest of `scores [N, P]`, ties to the lowest pool.

    Only the first `candidates [N]` pools compete; where they are fewer than `count`, higher pools fill the row behind
    them. A NaN score ranks last, so that a broken sequence reaches the logits and is refused there.
    """
    pools = scores.shape[1]
    count = min(count, pools)
    outside = torch.arange(pools, device=scores.device) >= candidates[:, None]
    scores = scores.masked_fill(outside, -torch.inf).nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    least = scores.topk(count, dim=1).values[:, -1:]
    above, level = scores > least, scores == least
    level &= level.cumsum(1, dtype=torch.int32) <= count - above.sum(1, keepdim=True)
    return (above | level).nonzero()[:, 1].view(len(scores), count)


def chosen_positions(chosen: Tensor, lengths: Tensor, pool_size: int, topk_tokens: int, always_tail: bool) -> Tensor:
    """Chosen pools `[N, K]` as ascending positions, then the tail of `lengths [N]`, then -1: int32 `[N, width]`."""
    width = topk_tokens + (pool_size - 1 if always_tail else 0)
    lengths = lengths[:, None]
    tail = lengths % pool_size
    begin = torch.minimum(lengths - tail, lengths.new_full((), topk_tokens // pool_size * pool_size))
    column = torch.arange(width, device=chosen.device)
    member = torch.arange(pool_size, device=chosen.device)
    pooled = (chosen[..., None] * pool_size + member).flatten(1)
    pooled = torch.nn.functional.pad(pooled, (0, width - pooled.shape[1]))
    out = torch.where(column < begin, pooled, -1)
    if always_tail:
        step = column - begin
        out = torch.where((step >= 0) & (step < tail), lengths - tail + step, out)
    return out.int()


def tile_up(pools: int) -> int:
    return -(-pools // TILE_POOLS) * TILE_POOLS


def index_select_prefill(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    softmax_scale: float,
    always_tail: bool,
) -> Tensor:
    """Positions each token attends to, int32 `[T, topk_tokens + pool_size - 1]` (`[T, topk_tokens]` without the tail).

    `q [T, HI, D]`, `weights [T, HI]`, `pool_cache [blocks * block_size / pool_size, D]`, `block_table` int32 `[B,
    max_blocks]`, `cu_seqlens` int32 `[B + 1]`, `start_positions` int32 `[B]`. The pools of this call's own tokens
    must be in the cache already. Formula: `Glm5NextTextIndexer.forward`; ties go to the lowest position.
    """
    device = q.device
    width = topk_tokens + (pool_size - 1 if always_tail else 0)
    out = torch.full((len(q), width), -1, dtype=torch.int32, device=device)
    bounds, starts = cu_seqlens.tolist(), start_positions.tolist()
    for b, start in enumerate(starts):
        first, last = bounds[b], bounds[b + 1]
        if first == last:
            continue
        lengths = torch.arange(start + 1, start + last - first + 1, device=device)
        pools = max(tile_up((start + last - first) // pool_size), TILE_POOLS)
        keys = _pool_keys(pool_cache, block_table[b : b + 1], pools, block_size // pool_size)
        step = max(1, GROUP_ELEMENTS // (q.shape[1] * TILE_POOLS))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            scores = pool_scores(q[begin:end].float(), weights[begin:end].float(), keys, softmax_scale)
            length = lengths[begin - first : end - first]
            chosen = best(scores, torch.div(length, pool_size, rounding_mode="floor"), topk_tokens // pool_size)
            out[begin:end] = chosen_positions(chosen, length, pool_size, topk_tokens, always_tail)
    return out


def index_select_decode(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    softmax_scale: float,
    always_tail: bool,
) -> Tensor:
    """One query per sequence: `q [B, HI, D]`, `weights [B, HI]`, `seq_lens` int32 `[B]` with this token counted.

    Returns what `index_select_prefill` returns for the last token of each sequence; a length of 0 (padding) gives -1.
    """
    lengths = seq_lens.long()
    pools = max(tile_up(int(lengths.max()) // pool_size), TILE_POOLS) if len(q) else TILE_POOLS
    keys = _pool_keys(pool_cache, block_table, pools, block_size // pool_size)
    scores = pool_scores(q.float(), weights.float(), keys, softmax_scale)
    chosen = best(scores, torch.div(lengths, pool_size, rounding_mode="floor"), topk_tokens // pool_size)
    return chosen_positions(chosen, lengths, pool_size, topk_tokens, always_tail)
