"""Device code that gathers what may be chosen of a row, by several programs; it knows no keys.

A level that as many groups reach as pools are wanted is reached by as many pools: with a few thousand groups it is
close below the lowest chosen score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.index_select._triton_level import level_of, scatter
from day0_kernels.index_select._triton_orders import HIGHEST, LOWEST, after_last, let_next_begin, log_group_of


@triton.jit
def _passing(groups_at, first, last, level, passed_at, TILE: tl.constexpr):
    """Writes the groups `first .. last - 1` that reach `level` to `passed_at`, in order; how many those are."""
    passed = 0
    for at in range(first, last, TILE):
        group = at + tl.arange(0, TILE)
        highest = tl.load(groups_at + group, mask=group < last, other=0).to(tl.uint32, bitcast=True)
        ones = (highest >= level).to(tl.int32)
        before = tl.cumsum(ones, 0) - ones
        scatter(passed_at + passed, before, group, ones == 1)
        passed += tl.sum(ones, axis=0)
    return passed


@triton.jit
def _places(lane, looked_at, passed_at, begin, log):
    """Pools that the lanes of a part look at: all of them, or those of the groups of 4 and more that passed."""
    inside = lane < looked_at
    group = tl.load(passed_at + (lane >> log), mask=inside & (log > 0), other=0)
    place = tl.where(log > 0, (group << log) + (lane & ((1 << log) - 1)), begin + lane)
    # Four lanes from a multiple of four on lie together, and what the others load is not used.
    return tl.max_contiguous(tl.multiple_of(tl.where(inside, place, 0), [4]), [4])


@triton.jit(do_not_specialize=["chosen_pools"])
def gather(
    orders,
    groups,
    places,
    counts,
    seq_lens,
    orders_row,
    groups_row,
    part_pools,
    chosen_pools,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    LARGEST: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, part): moves what reaches the row's level to the front of the part, and says how many that are.

    Orders are moved in `orders`, their pools written to `places`, both in the order of the pools; orders of 0 make
    their number a multiple of 4. Groups below the level are not looked into. TOP is at least the number of groups,
    `part_pools` a multiple of TILE and of LARGEST.
    """
    let_next_begin(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pools = tl.load(seq_lens + row) // P
    begin = part * part_pools
    end = tl.minimum(begin + part_pools, pools)
    after_last(OVERLAP)
    if (pools > chosen_pools) & (chosen_pools > 0):
        level = tl.full([], LOWEST, tl.uint32)
        log = log_group_of(pools, chosen_pools, LARGEST)
        orders_at, places_at = orders + row * orders_row, places + row * orders_row
        groups_at = groups + row * groups_row
        looked_at = end - begin
        # Groups that reach the level wait behind the pools they have room for.
        passed_at = places_at + begin + part_pools - (part_pools >> log)
        if (log > 0) & (begin < end):
            index = tl.arange(0, TOP)
            count = (pools + (1 << log) - 1) >> log
            # No mask, so that a load is 16 bytes: every row has TOP.
            highest = tl.load(groups_at + index).to(tl.uint32, bitcast=True)
            highest = tl.where(index < count, highest, 0).to(tl.uint32)
            lowest = tl.min(tl.where(highest == 0, HIGHEST, highest), axis=0)
            level, _ = level_of(highest, chosen_pools, chosen_pools // 4, lowest, count)
            # To look for pairs costs more than to look at all.
            log = tl.where(log > 1, log, 0)
            if log > 0:
                passed = _passing(groups_at, begin >> log, (end + (1 << log) - 1) >> log, level, passed_at, TILE)
                looked_at = passed << log
                tl.debug_barrier()
        kept = 0
        lane = tl.arange(0, TILE)
        following = _places(lane, looked_at, passed_at, begin, log)
        order_of_next = tl.load(orders_at + following)
        for at in range(0, looked_at, TILE):
            place, order = following, order_of_next
            # The tile after this one is on its way while this one is looked through.
            following = _places(at + TILE + lane, looked_at, passed_at, begin, log)
            order_of_next = tl.load(orders_at + following)
            keep = (order.to(tl.uint32, bitcast=True) >= level) & (at + lane < looked_at) & (place < end)
            ones = keep.to(tl.int32)
            before = tl.cumsum(ones, 0) - ones
            # Every load of the tile is done, and what is written lies at or before it.
            tl.debug_barrier()
            scatter(orders_at + begin + kept, before, order, keep)
            scatter(places_at + begin + kept, before, place, keep)
            kept += tl.sum(ones, axis=0)
        # A part is filled up to four, so that candidates can be loaded by 16 bytes.
        pad = kept + tl.arange(0, 4)
        tl.store(orders_at + begin + pad, 0, mask=pad < (kept + 3) // 4 * 4)
        tl.store(counts + row * PARTS + part, (kept + 3) // 4 * 4)
