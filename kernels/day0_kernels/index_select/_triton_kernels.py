"""Device code of index selection: scores of pooled keys; it does not know how the highest are chosen."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.index_select._triton_orders import let_next_begin, log_group_of, ordered, store_orders
from day0_kernels.triton_rounding import INTERPRETED, float32_of


@triton.jit
def _operand(x):
    """What a product takes: the interpreter knows no bfloat16."""
    if INTERPRETED:
        return float32_of(x)
    else:
        return x


@triton.jit(do_not_specialize=["chosen_pools"])
def score_pools(
    q,
    weights,
    pool_cache,
    block_table,
    seq_lens,
    orders,
    groups,
    table_row,
    orders_row,
    groups_row,
    chosen_pools,
    scale,
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

    A row whose pools are all chosen needs no score. A pool has one order of summation, whatever is beside it.
    """
    let_next_begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    pools = tl.load(seq_lens + row) // P
    first = tl.program_id(1) * (TILES * BLOCK_P)
    if (first < pools) & (pools > chosen_pools):
        head, channel, lane = tl.arange(0, BLOCK_HI), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
        in_h, in_d = head < HI, channel < D
        query_at = q + (row * HI + head[None, :]) * D + channel[:, None]
        query = _operand(tl.load(query_at, mask=in_h[None, :] & in_d[:, None], other=0.0))
        share = float32_of(tl.load(weights + row * HI + head, mask=in_h, other=0.0))
        log_group = log_group_of(pools, chosen_pools, LARGEST)
        last = tl.minimum(first + TILES * BLOCK_P, pools)
        for at in tl.range(first, last, BLOCK_P, num_stages=STAGES):
            pool = at + lane
            inside = pool < pools
            block = tl.load(block_table + row * table_row + pool // POOLS_A_BLOCK, mask=inside, other=-1)
            key_row = block.to(tl.int64) * POOLS_A_BLOCK + pool % POOLS_A_BLOCK
            key_at = pool_cache + key_row[:, None] * D + channel[None, :]
            key = _operand(tl.load(key_at, mask=(block >= 0)[:, None] & in_d[None, :], other=0.0))
            dots = tl.dot(key, query, input_precision="ieee") * scale
            # A comparison that lets NaN through, as relu does: a broken row must not pass for one of score 0.
            dots = tl.where(dots < 0.0, 0.0, dots)
            score = tl.sum(tl.where(in_h[None, :], dots * share[None, :], 0.0), axis=1)
            order = tl.where(inside, ordered(score), 0).to(tl.uint32)
            orders_at, groups_at = orders + row * orders_row, groups + row * groups_row
            store_orders(orders_at, groups_at, at, pools, log_group, order, BLOCK_P, LARGEST)
