"""Device code of the groups of warps that multiply tiles of 32 latent rows, in Gluon for Hopper; not interpreted.

As the consumers of `sparse_mla`, whose tiles have 64 rows: of 32 two pairs fit into shared memory, so that one can be
widened while the other is multiplied. Who writes the tiles they do not know.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from day0_kernels.sparse_mla._triton_hopper import _LOG2_E, APART, IN_TURN, _exchanged, _position
from day0_kernels.sparse_mla._triton_runs import exp2, park, parked_of, share_of_whole, shares_of

# Rows of a tile.
TILE = gl.constexpr(32)


@gluon.jit
def _logits(query, tile, query_tail, tail, LAYOUT: gl.constexpr, TAIL: gl.constexpr):
    none = gl.full([64, TILE], 0.0, gl.float32, layout=LAYOUT)
    dots = warpgroup_mma(query, tile.permute((1, 0)), none, use_acc=False, is_async=True)
    if TAIL:
        dots = warpgroup_mma(query_tail, tail.permute((1, 0)), dots, is_async=True)
    return warpgroup_mma_wait(0, deps=(dots,))


@gluon.jit
def consume(
    shared,
    work,
    parts,
    peaks,
    totals,
    out,
    H: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    MODE: gl.constexpr,
    PIECES: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Group SIDE: logits of tile SIDE of every pair, then half SIDE of the piece's value columns of both tiles."""
    query, query_tail, tiles, tails, weights, notes, full, empty, noted, ready = shared
    named, begin, end, used, run_width, scale, heads, piece = work
    N: gl.constexpr = V // PIECES // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    BY_HEAD: gl.constexpr = gl.SliceLayout(1, LOGITS)
    BY_VALUE_HEAD: gl.constexpr = gl.SliceLayout(1, VALUES)
    dtype: gl.constexpr = query.dtype
    values = tiles._reinterpret(dtype, [8 * PIECES, TILE, N], tiles.layout)
    lane = SIDE * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, LOGITS))
    whole_peak = gl.full([64], float("-inf"), gl.float32, layout=BY_HEAD)
    whole_total = gl.full([64], 0.0, gl.float32, layout=BY_HEAD)
    held = gl.full([64, N], 0.0, gl.float32, layout=VALUES)
    zero = 0
    pair = 0
    turn = 0
    for start in range(begin, used, run_width):
        stop = gl.minimum(start + run_width, used)
        peak = gl.full([64], float("-inf"), gl.float32, layout=BY_HEAD)
        total = gl.full([64], 0.0, gl.float32, layout=BY_HEAD)
        held = gl.full([64, N], 0.0, gl.float32, layout=VALUES)
        for at in range(start, stop, 2 * TILE):
            stage = pair % 2 * 2
            phase = pair // 2 % 2
            turned = pair % 2
            pair += 1
            # A zero the compiler does not see through: with it the query's addresses are made where they are used, not
            # kept in registers of their own from the start.
            zero = gl.where(scale > 1e30, at, zero)
            mine = _position(named, at + lane, end) >= 0
            mbarrier.wait(full.index(stage + SIDE), phase)
            fence_async_shared()
            logits = _logits(
                query.index(zero),
                tiles.index(stage + SIDE),
                query_tail.index(zero),
                tails.index(stage + SIDE),
                LOGITS,
                R > V,
            )
            logits = gl.where(mine[None, :], logits * (scale * _LOG2_E), float("-inf"))
            highest = gl.max(logits, axis=1)
            other = _exchanged(notes, noted, turn, highest, SIDE)
            turn += 1
            higher = gl.maximum(gl.maximum(peak, highest), other)
            # A pair of -1 alone keeps the peak at -inf, whose difference to itself would be NaN.
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            fade = exp2(peak - safe)
            peak = higher
            weight = exp2(logits - safe[:, None])
            weights.index(stage + SIDE).store(weight.to(dtype))
            fence_async_shared()
            mbarrier.arrive(ready.index(SIDE), count=1)
            total = gl.fma(total, fade, gl.sum(weight, axis=1))
            held = held * gl.convert_layout(fade, BY_VALUE_HEAD)[:, None]
            mbarrier.wait(ready.index(0), turned)
            first = values.index(stage * 2 * PIECES + piece * 2 + SIDE)
            going = warpgroup_mma(weights.index(stage), first, held, is_async=True)
            mbarrier.wait(ready.index(1), turned)
            second = values.index((stage + 1) * 2 * PIECES + piece * 2 + SIDE)
            going = warpgroup_mma(weights.index(stage + 1), second, going, is_async=True)
            going = warpgroup_mma_wait(1, deps=(going,))
            mbarrier.arrive(empty.index(stage), count=1)
            held = warpgroup_mma_wait(0, deps=(going,))
            mbarrier.arrive(empty.index(stage + 1), count=1)
        other = _exchanged(notes, noted, turn, total, SIDE)
        turn += 1
        # In the same order on both sides.
        total = total + other if SIDE == 0 else other + total
        if MODE == IN_TURN:
            # What `join_runs` does, to the bit.
            written = total != 0.0
            top, old, new = shares_of(whole_peak, peak)
            whole_total = gl.where(written, gl.fma(total, new, whole_total * old), whole_total)
            whole_peak = gl.where(written, top, whole_peak)
            if start > begin:
                before = parked_of(parts, heads, H % 64 == 0, VALUES)
                kept = gl.convert_layout(gl.where(written, old, 1.0), BY_VALUE_HEAD)[:, None]
                added = gl.convert_layout(gl.where(written, new, 0.0), BY_VALUE_HEAD)[:, None]
                held = gl.fma(held, gl.full([64, N], 0.0, gl.float32, layout=VALUES) + added, before * kept)
            if stop < used:
                park(parts, held, heads, H % 64 == 0)
        else:
            whole_peak = peak
            whole_total = total
    column = (piece * 2 + SIDE) * N
    if MODE == APART:
        head = gl.arange(0, 64, layout=BY_HEAD)
        once = (head < heads) & (piece * 2 + SIDE == 0)
        gl.store(peaks + head, whole_peak, mask=once)
        gl.store(totals + head, whole_total, mask=once)
        # Through shared memory, here and below, so that a warp writes whole lines.
        ACROSS: gl.constexpr = N // 4 if N < 128 else 32
        WIDE_FLOATS: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
        FLOATS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
        staged = tiles._reinterpret(gl.float32, [V // N, 64, N], FLOATS).index(SIDE)
        staged.store(held)
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_FLOATS))
        at = head[:, None] * V + (column + gl.arange(0, N, layout=gl.SliceLayout(0, WIDE_FLOATS)))[None, :]
        gl.store(parts + at, staged.load(WIDE_FLOATS), mask=(head < heads)[:, None] & (used > begin))
    else:
        head = gl.arange(0, 64, layout=BY_HEAD)
        share = share_of_whole(whole_peak, whole_total, out, head < heads, False)
        held = held * gl.convert_layout(share, BY_VALUE_HEAD)[:, None]
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
        staged = tiles._reinterpret(dtype, [4 * PIECES, 64, N], tiles.layout).index(SIDE)
        staged.store(held.to(dtype))
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        at = head[:, None] * V + (column + gl.arange(0, N, layout=gl.SliceLayout(0, WIDE)))[None, :]
        gl.store(out + at, staged.load(WIDE), mask=(head < heads)[:, None])
