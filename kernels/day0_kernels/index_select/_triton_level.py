"""Device code that finds the level a number of orders reach, and stores from scattered lanes; it knows no row."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED


@triton.jit
def count_from(order, level):
    return tl.sum((order >= level).to(tl.int32), axis=0)


@triton.jit
def middle_of(low, high, from_low, above_high, wanted, turn):
    """Where to look next in `low + 1 .. high`: by proportion, which is quick, or half-way, which bounds the steps."""
    span = high - low
    share = (from_low - wanted).to(tl.float32) / (from_low - above_high).to(tl.float32)
    guess = tl.minimum((share * span.to(tl.float32)).to(tl.uint32), span - 1)
    return low + 1 + tl.where(turn == 0, guess, (span - 1) >> 1)


@triton.jit
def narrowed(count, middle, low, high, from_low, above_high, wanted):
    enough = count >= wanted
    low = tl.where(enough, middle, low)
    high = tl.where(enough, high, middle - 1)
    from_low = tl.where(enough, count, from_low)
    above_high = tl.where(enough, above_high, count)
    return low, high, from_low, above_high


@triton.jit
def level_of(order, wanted, slack, low, from_low):
    """A level that at least `wanted` of `order` reach: at most `slack` more, or else fewer are above it.

    `from_low` are from `low` on, at least `wanted`. How many reach the level comes back with it.
    """
    high = tl.max(order, axis=0)
    above_high = 0
    turn = 0
    while (low < high) & (from_low > wanted + slack):
        middle = middle_of(low, high, from_low, above_high, wanted + slack // 2, turn)
        count = count_from(order, middle)
        low, high, from_low, above_high = narrowed(count, middle, low, high, from_low, above_high, wanted)
        turn = 1 - turn
    return low, from_low


@triton.jit
def scatter(at, rank, value, chosen):
    """Stores int32 `value` at `at + rank` where `chosen`, from the lanes where they are.

    A store of scattered lanes would first move addresses, values and masks through shared memory into another layout.
    """
    if INTERPRETED:
        tl.store(at + rank, value, mask=chosen)
    else:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred p;
                .reg .b64 at;
                setp.ne.s32 p, $4, 0;
                mad.wide.s32 at, $2, 4, $1;
                @p st.global.b32 [at], $3;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r,r",
            [at.to(tl.int64), rank, value, chosen.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
