"""Device code of index selection: scores as integers of the same order, and the exact choice of the highest."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, float32_of

_DIGIT_BITS = tl.constexpr(8)
_DIGITS = tl.constexpr(256)
_LOWEST = tl.constexpr(0x007FFFFF)


@triton.jit
def _operand(x):
    """What a product takes: the interpreter knows no bfloat16."""
    if INTERPRETED:
        return float32_of(x)
    else:
        return x


@triton.jit
def _ordered(score):
    """uint32 that orders as float32 does; NaN equals -inf, which is `_LOWEST`.

    A row never has zeros of both signs: each head adds zeros of its weight's sign to every pool.
    """
    bits = score.to(tl.uint32, bitcast=True)
    order = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score != score, _LOWEST, order).to(tl.uint32)


@triton.jit(do_not_specialize=["chosen_pools"])
def score_pools(
    q,
    weights,
    pool_cache,
    block_table,
    seq_lens,
    orders,
    table_row,
    orders_row,
    chosen_pools,
    scale,
    HI: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    POOLS_A_BLOCK: tl.constexpr,
    BLOCK_HI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (row, run of `TILES * BLOCK_P` pools): `orders[row, pool]` of the row's complete pools.

    A row whose pools are all chosen needs no score. A pool has one order of summation, whatever is beside it.
    """
    row = tl.program_id(0).to(tl.int64)
    pools = tl.load(seq_lens + row) // P
    first = tl.program_id(1) * (TILES * BLOCK_P)
    if (first < pools) & (pools > chosen_pools):
        head, channel, lane = tl.arange(0, BLOCK_HI), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
        in_h, in_d = head < HI, channel < D
        query_at = q + (row * HI + head[None, :]) * D + channel[:, None]
        query = _operand(tl.load(query_at, mask=in_h[None, :] & in_d[:, None], other=0.0))
        share = float32_of(tl.load(weights + row * HI + head, mask=in_h, other=0.0))
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
            tl.store(orders + row * orders_row + pool, _ordered(score).to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _digit_of(orders_at, pools, at, prefix, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Counts of the digit at SHIFT among the pools of a tile whose higher digits are `prefix`."""
    pool = at + tl.arange(0, TILE)
    inside = pool < pools
    order = tl.load(orders_at + pool, mask=inside, other=0).to(tl.uint32, bitcast=True)
    if SHIFT + _DIGIT_BITS < 32:
        inside = inside & ((order >> (SHIFT + _DIGIT_BITS)) == prefix)
    digit = tl.where(inside, (order >> SHIFT) & (_DIGITS - 1), 0).to(tl.int32)
    return tl.histogram(digit, _DIGITS, mask=inside)


@triton.jit(do_not_specialize=["W", "chosen_pools"])
def choose(
    orders,
    seq_lens,
    out,
    orders_row,
    W,
    chosen_pools,
    P: tl.constexpr,
    ALWAYS_TAIL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row): positions of the `chosen_pools` highest pools, ascending, ties to the lowest; tail; -1.

    The lowest order that is chosen is found digit by digit from the highest on; then one pass in the order of the
    pools writes those above it and as many of its equals as there is room for.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + row)
    pools = length // P
    kept = tl.minimum(pools, chosen_pools)
    out_at = out + row * W
    lane = tl.arange(0, TILE)
    begin = kept * P
    tail = length - pools * P
    for at in range(0, W, TILE):
        column = at + lane
        step = column - begin
        position = tl.full([TILE], -1, tl.int32)
        if ALWAYS_TAIL:
            position = tl.where(step < tail, pools * P + step, -1)
        if pools <= chosen_pools:
            # Every complete pool is chosen: position and column are one.
            position = tl.where(step < 0, column, position)
        tl.store(out_at + column, position, mask=(column < W) & ((step >= 0) | (pools <= chosen_pools)))
    if (pools > chosen_pools) & (kept > 0):
        orders_at = orders + row * orders_row
        bins = tl.arange(0, _DIGITS)
        room = kept
        level = tl.zeros([], tl.uint32)
        for place in tl.static_range(4):
            counts = tl.zeros([_DIGITS], tl.int32)
            for at in range(0, pools, TILE):
                counts += _digit_of(orders_at, pools, at, level, 24 - 8 * place, TILE)
            # From a digit on upwards; the highest digit that reaches the room is the threshold's.
            upwards = tl.sum(counts, axis=0) - tl.cumsum(counts, 0) + counts
            digit = tl.sum((upwards >= room).to(tl.int32), axis=0) - 1
            room -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
            level = (level << _DIGIT_BITS) | digit.to(tl.uint32)
        written = 0
        equals = 0
        for at in range(0, pools, TILE):
            pool = at + lane
            order = tl.load(orders_at + pool, mask=pool < pools, other=0).to(tl.uint32, bitcast=True)
            above, equal = (order > level).to(tl.int32), (order == level).to(tl.int32)
            # Both counts in one scan: a tile has at most 2^14 pools.
            packed = above + (equal << 16)
            before = tl.cumsum(packed, 0) - packed
            above_before, equal_before = written + (before & 0xFFFF), equals + (before >> 16)
            chosen = (above == 1) | ((equal == 1) & (equal_before < room))
            rank = above_before + tl.minimum(equal_before, room)
            for member in tl.static_range(P):
                tl.store(out_at + rank * P + member, pool * P + member, mask=chosen & (pool < pools))
            written += tl.sum(above, axis=0)
            equals += tl.sum(equal, axis=0)
