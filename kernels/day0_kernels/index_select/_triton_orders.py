"""Device code that turns scores into orders, and how a launch follows the one before; it knows no keys and no choice.

An order is an integer that orders as the score does. Whoever scores also writes the highest of every group of pools.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from day0_kernels.triton_rounding import INTERPRETED

LOWEST = tl.constexpr(0x007FFFFF)
HIGHEST = tl.constexpr(0xFFFFFFFF)


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """With OVERLAP the next launch may take its place before this one ends; it waits by `after_last`."""
    if OVERLAP and not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def after_last(OVERLAP: tl.constexpr):
    """Waits until the launch before has ended and what it wrote is seen."""
    if OVERLAP and not INTERPRETED:
        gdc_wait()


@triton.jit
def ordered(score):
    """uint32 that orders as float32 does; zeros are equal, NaN equals -inf, which is `LOWEST`; 0 is less than any."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    order = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score != score, LOWEST, order).to(tl.uint32)


@triton.jit
def log_group_of(pools, chosen_pools, LARGEST: tl.constexpr):
    """Pools a group of a row as a power of 2: the most, up to LARGEST, that leave over 2 groups a chosen pool, or 1."""
    log_group = 0
    for log in tl.static_range(1, 7):
        if (1 << log) <= LARGEST:
            log_group = tl.where(pools > (2 << log) * chosen_pools, log, log_group)
    return log_group


@triton.jit
def _store_groups(groups_at, at, pools, log_group, order, COUNT: tl.constexpr, LOG: tl.constexpr):
    if log_group == LOG:
        highest = tl.max(tl.reshape(order, [COUNT >> LOG, 1 << LOG]), axis=1)
        index = (at >> LOG) + tl.arange(0, COUNT >> LOG)
        tl.store(groups_at + index, highest.to(tl.int32, bitcast=True), mask=(index << LOG) < pools)


@triton.jit
def store_orders(orders_at, groups_at, at, pools, log_group, order, COUNT: tl.constexpr, LARGEST: tl.constexpr):
    """Writes orders of the pools `at .. at + COUNT - 1` (0 from `pools` on) and the highest of each group of them.

    `at` is a multiple of COUNT, COUNT one of LARGEST, `log_group` what `log_group_of` says.
    """
    lane = at + tl.arange(0, COUNT)
    tl.store(orders_at + lane, order.to(tl.int32, bitcast=True), mask=lane < pools)
    for log in tl.static_range(1, 7):
        if (1 << log) <= LARGEST:
            _store_groups(groups_at, at, pools, log_group, order, COUNT, log)
