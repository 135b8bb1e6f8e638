"""Device code of index selection on FP8 queries and keys: scores; it does not know how the highest are chosen."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.index_select._triton_orders import let_next_begin, log_group_of, ordered, store_orders


@triton.jit(do_not_specialize=["chosen_pools"])
def score_fp8_pools(
    q,
    weights,
    keys,
    key_scales,
    block_table,
    seq_lens,
    orders,
    groups,
    table_row,
    orders_row,
    groups_row,
    chosen_pools,
    HI: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    POOLS_A_BLOCK: tl.constexpr,
    BLOCK_HI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, run of `TILES * BLOCK_P` pools): orders of the row's complete pools and of its groups.

    `keys` (e4m3) and `key_scales` (float32) are two views of one cache: a block is POOLS_A_BLOCK keys, then as many
    scales. A row whose pools are all chosen needs no score. A pool has one order of summation, whatever is beside it.
    """
    let_next_begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    pools = tl.load(seq_lens + row) // P
    first = tl.program_id(1) * (TILES * BLOCK_P)
    if (first < pools) & (pools > chosen_pools):
        head, channel, lane = tl.arange(0, BLOCK_HI), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
        in_h, in_d = head < HI, channel < D
        query_at = q + (row * HI + head[None, :]) * D + channel[:, None]
        query = tl.load(query_at, mask=in_h[None, :] & in_d[:, None], other=0.0)
        share = tl.load(weights + row * HI + head, mask=in_h, other=0.0)
        log_group = log_group_of(pools, chosen_pools, LARGEST)
        last = tl.minimum(first + TILES * BLOCK_P, pools)
        for at in tl.range(first, last, BLOCK_P, num_stages=STAGES):
            pool = at + lane
            inside = pool < pools
            block = tl.load(block_table + row * table_row + pool // POOLS_A_BLOCK, mask=inside, other=-1).to(tl.int64)
            known = block >= 0
            begin = block * (POOLS_A_BLOCK * (D + 4)) + pool % POOLS_A_BLOCK * D
            key = tl.load(keys + begin[:, None] + channel[None, :], mask=known[:, None] & in_d[None, :], other=0.0)
            scale_at = block * (POOLS_A_BLOCK * (D // 4 + 1)) + POOLS_A_BLOCK * D // 4 + pool % POOLS_A_BLOCK
            key_scale = tl.load(key_scales + scale_at, mask=known, other=0.0)
            dots = tl.dot(key, query)
            # A comparison that lets NaN through, as relu does: a broken row must not pass for one of score 0.
            dots = tl.where(dots < 0.0, 0.0, dots)
            score = tl.sum(dots * share[None, :], axis=1) * key_scale
            order = tl.where(inside, ordered(score), 0).to(tl.uint32)
            orders_at, groups_at = orders + row * orders_row, groups + row * groups_row
            store_orders(orders_at, groups_at, at, pools, log_group, order, BLOCK_P, LARGEST)


@triton.jit(do_not_specialize=["chosen_pools"])
def score_whole_blocks(
    q,
    weights,
    keys,
    key_scales,
    block_table,
    seq_lens,
    orders,
    groups,
    table_row,
    orders_row,
    groups_row,
    chosen_pools,
    HI: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    POOLS_A_BLOCK: tl.constexpr,
    BLOCK_HI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `score_fp8_pools` where BLOCK_P divides POOLS_A_BLOCK: a tile lies in one block, found a step ahead."""
    let_next_begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    pools = tl.load(seq_lens + row) // P
    first = tl.program_id(1) * (TILES * BLOCK_P)
    if (first < pools) & (pools > chosen_pools):
        head, channel, lane = tl.arange(0, BLOCK_HI), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
        in_h, in_d = head < HI, channel < D
        query_at = q + (row * HI + head[None, :]) * D + channel[:, None]
        query = tl.load(query_at, mask=in_h[None, :] & in_d[:, None], other=0.0)
        share = tl.load(weights + row * HI + head, mask=in_h, other=0.0)
        log_group = log_group_of(pools, chosen_pools, LARGEST)
        last = tl.minimum(first + TILES * BLOCK_P, pools)
        table_at = block_table + row * table_row
        within = lane[:, None] * D + channel[None, :]
        block = tl.load(table_at + first // POOLS_A_BLOCK)
        for at in tl.range(first, last, BLOCK_P, num_stages=STAGES):
            following = tl.load(table_at + tl.minimum(at + BLOCK_P, last - 1) // POOLS_A_BLOCK)
            known = block >= 0
            begin = tl.maximum(block, 0).to(tl.int64)
            in_block = at % POOLS_A_BLOCK
            # The whole tile, what lies behind the last pool too: it is not used.
            key_at = keys + (begin * (POOLS_A_BLOCK * (D + 4)) + in_block * D) + within
            key = tl.load(key_at) if D == BLOCK_D else tl.load(key_at, mask=in_d[None, :], other=0.0)
            scale_at = begin * (POOLS_A_BLOCK * (D // 4 + 1)) + POOLS_A_BLOCK * D // 4 + in_block
            key_scale = tl.load(key_scales + scale_at + lane)
            dots = tl.dot(key, query)
            # A comparison that lets NaN through, as relu does: a broken row must not pass for one of score 0.
            dots = tl.where(dots < 0.0, 0.0, dots)
            score = tl.sum(dots * share[None, :], axis=1) * key_scale
            score = tl.where(known, score, 0.0)
            order = tl.where(at + lane < pools, ordered(score), 0).to(tl.uint32)
            orders_at, groups_at = orders + row * orders_row, groups + row * groups_row
            store_orders(orders_at, groups_at, at, pools, log_group, order, BLOCK_P, LARGEST)
            block = following
