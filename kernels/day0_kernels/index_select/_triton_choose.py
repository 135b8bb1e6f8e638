"""Device code of an exact choice among a row's candidates, ties to the lowest pool; it knows no keys."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.index_select._triton_level import count_from, level_of, middle_of, narrowed, scatter
from day0_kernels.index_select._triton_orders import HIGHEST, after_last


@triton.jit
def _candidate(lane, counts_at, part_pools, PARTS: tl.constexpr):
    """Where the candidates `lane` of a row lie: those of a part are together, at its front."""
    at = lane
    end = 0
    for part in tl.static_range(PARTS - 1):
        count = tl.load(counts_at + part)
        end += count
        at += tl.where(lane >= end, part_pools - count, 0)
    return at


@triton.jit
def _candidates(
    orders_at,
    counts_at,
    first,
    total,
    part_pools,
    PARTS: tl.constexpr,
    GATHERED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Orders of the candidates `first .. first + LANES - 1`, 0 from `total` on, and where they lie."""
    lane = first + tl.arange(0, LANES)
    inside = lane < total
    at = lane
    if GATHERED:
        # Four lanes from a multiple of four on lie together, and what the others load is not used.
        at = tl.where(inside, _candidate(lane, counts_at, part_pools, PARTS), 0)
        at = tl.max_contiguous(tl.multiple_of(at, [4]), [4])
    order = tl.load(orders_at + at).to(tl.uint32, bitcast=True)
    return tl.where(inside, order, 0).to(tl.uint32), at


@triton.jit
def _pools_of(places_at, at, GATHERED: tl.constexpr):
    if GATHERED:
        return tl.load(places_at + at)
    else:
        return at


@triton.jit
def _store_chosen(out_at, order, pool, level, written, equals, room):
    """Writes the pools above `level`, and as many equal to it as there is room for; both counts from here on."""
    above, equal = (order > level).to(tl.int32), (order == level).to(tl.int32)
    # Both counts in one scan: a tile has fewer than 2^15 candidates.
    packed = above + (equal << 16)
    before = tl.cumsum(packed, 0) - packed
    equal_before = equals + (before >> 16)
    chosen = (above == 1) | ((equal == 1) & (equal_before < room))
    rank = written + (before & 0xFFFF) + tl.minimum(equal_before, room)
    scatter(out_at, rank, pool, chosen)
    total = tl.sum(packed, axis=0)
    return written + (total & 0xFFFF), equals + (total >> 16)


@triton.jit
def _choose_few(
    out_at,
    orders_at,
    places_at,
    counts_at,
    total,
    kept,
    part_pools,
    PARTS: tl.constexpr,
    GATHERED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Candidates that registers hold."""
    order, at = _candidates(orders_at, counts_at, 0, total, part_pools, PARTS, GATHERED, LANES)
    pool = _pools_of(places_at, at, GATHERED)
    lowest = tl.min(tl.where(order == 0, HIGHEST, order), axis=0)
    level, _ = level_of(order, kept, 0, lowest, count_from(order, 1))
    # Where exactly `kept` reach the level, all of them do, equals too.
    room = kept - count_from(order, level + 1)
    _store_chosen(out_at, order, pool, level, 0, 0, room)


@triton.jit
def _choose_many(
    out_at,
    orders_at,
    places_at,
    counts_at,
    total,
    kept,
    part_pools,
    PARTS: tl.constexpr,
    GATHERED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Any number of candidates, read again for every step."""
    low, high = tl.full([], HIGHEST, tl.uint32), tl.full([], 0, tl.uint32)
    from_low, above_high, turn = 0, 0, 0
    for first in range(0, total, LANES):
        order, at = _candidates(orders_at, counts_at, first, total, part_pools, PARTS, GATHERED, LANES)
        low = tl.minimum(low, tl.min(tl.where(order == 0, HIGHEST, order), axis=0))
        high = tl.maximum(high, tl.max(order, axis=0))
        from_low += count_from(order, 1)
    while (low < high) & (from_low > kept):
        middle = middle_of(low, high, from_low, above_high, kept, turn)
        count = 0
        for first in range(0, total, LANES):
            order, at = _candidates(orders_at, counts_at, first, total, part_pools, PARTS, GATHERED, LANES)
            count += count_from(order, middle)
        low, high, from_low, above_high = narrowed(count, middle, low, high, from_low, above_high, kept)
        turn = 1 - turn
    room = kept
    for first in range(0, total, LANES):
        order, at = _candidates(orders_at, counts_at, first, total, part_pools, PARTS, GATHERED, LANES)
        room -= count_from(order, low + 1)
    written, equals = 0, 0
    for first in range(0, total, LANES):
        order, at = _candidates(orders_at, counts_at, first, total, part_pools, PARTS, GATHERED, LANES)
        pool = _pools_of(places_at, at, GATHERED)
        written, equals = _store_chosen(out_at, order, pool, low, written, equals, room)


@triton.jit
def _expand(out_at, kept, P: tl.constexpr, MEMBERS: tl.constexpr):
    """Turns the pools at the front of a row into the positions of their members, in place."""
    if P > 1:
        tl.debug_barrier()
        lane = tl.arange(0, MEMBERS)
        inside = lane < kept * P
        pool = tl.load(out_at + lane // P, mask=inside, other=0)
        tl.debug_barrier()
        tl.store(out_at + lane, pool * P + lane % P, mask=inside)


@triton.jit(do_not_specialize=["W", "chosen_pools"])
def choose(
    orders,
    places,
    counts,
    seq_lens,
    out,
    orders_row,
    part_pools,
    W,
    chosen_pools,
    P: tl.constexpr,
    ALWAYS_TAIL: tl.constexpr,
    GATHERED: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row): positions of the `chosen_pools` highest pools, ascending, ties to the lowest; tail; -1.

    Candidates are what `gather` left, or all pools. MEMBERS is at least `P * chosen_pools`.
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
    after_last(OVERLAP)
    if (pools > chosen_pools) & (kept > 0):
        orders_at, places_at, counts_at = orders + row * orders_row, places + row * orders_row, counts + row * PARTS
        total = pools
        if GATHERED:
            total = 0
            for part in tl.static_range(PARTS):
                total += tl.load(counts_at + part)
        if total <= LANES:
            _choose_few(out_at, orders_at, places_at, counts_at, total, kept, part_pools, PARTS, GATHERED, LANES)
        elif total <= 2 * LANES:
            _choose_few(out_at, orders_at, places_at, counts_at, total, kept, part_pools, PARTS, GATHERED, 2 * LANES)
        else:
            _choose_many(out_at, orders_at, places_at, counts_at, total, kept, part_pools, PARTS, GATHERED, LANES)
        _expand(out_at, kept, P, MEMBERS)
