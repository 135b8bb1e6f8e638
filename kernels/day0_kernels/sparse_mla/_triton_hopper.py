"""Device code of sparse latent attention for Hopper's warp group products, in Gluon; nothing interprets it.

A program has 64 heads of one query. Its positions come in pairs of tiles of 64 latent rows, which four warps gather
into shared memory as soon as there is room. Two groups of four warps each make the logits of one tile of the pair,
agree on the peak, exchange their weights, and add up half of the value columns of both tiles each. A gathered tile is
the right operand of both products: transposed of the logits, as it lies of the values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from day0_kernels.sparse_mla._triton_runs import exp2, park, parked_of, share_of_whole, shares_of

# What a program does with the runs of its query: all positions are one; one run is its own; one after the other.
WHOLE = gl.constexpr(0)
APART = gl.constexpr(1)
IN_TURN = gl.constexpr(2)

_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _position(named, w, end):
    return gl.load(named + w, mask=w < end, other=-1)


@gluon.jit
def _block(table, position, BLOCK_SIZE: gl.constexpr):
    return gl.load(table + position // BLOCK_SIZE, mask=position >= 0, other=-1)


@gluon.jit
def _gather(
    latents,
    tile,
    tail,
    full,
    position,
    block,
    R: gl.constexpr,
    V: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    GATHER: gl.constexpr,
):
    """Starts the copy of 64 latent rows, those that are not there as zeros; `full` is told when it is done."""
    there = block >= 0
    slot = gl.where(there, block, 0).to(gl.int64) * BLOCK_SIZE + gl.where(there, position % BLOCK_SIZE, 0)
    at = latents + slot * R
    column = gl.arange(0, V, layout=gl.SliceLayout(0, GATHER))
    async_copy.async_copy_global_to_shared(tile, at[:, None] + column[None, :], mask=there[:, None])
    if R > V:
        behind = V + gl.arange(0, R - V, layout=gl.SliceLayout(0, GATHER))
        async_copy.async_copy_global_to_shared(tail, at[:, None] + behind[None, :], mask=there[:, None])
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _produce(
    shared,
    latents,
    named,
    table,
    begun,
    end,
    count,
    R: gl.constexpr,
    V: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    GATHER: gl.constexpr,
):
    """Gathers tiles 2 to `count`. A row is three reads deep, position, block, row: each is begun a tile ahead."""
    _query, _tail, tiles, tails, _weights, _notes, full, empty, _noted, _ready = shared
    w, position, position_next, block = begun
    for t in range(2, count):
        b = t % 2
        block_next = _block(table, position_next, BLOCK_SIZE)
        position_after = _position(named, w + (t * 64 + 128), end)
        mbarrier.wait(empty.index(b), (t // 2 + 1) % 2)
        _gather(latents, tiles.index(b), tails.index(b), full.index(b), position, block, R, V, BLOCK_SIZE, GATHER)
        position = position_next
        position_next = position_after
        block = block_next
    # Of a query without a position nobody waits for the first two.
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _logits(query, tile, query_tail, tail, LAYOUT: gl.constexpr, TAIL: gl.constexpr):
    none = gl.full([64, 64], 0.0, gl.float32, layout=LAYOUT)
    dots = warpgroup_mma(query, tile.permute((1, 0)), none, use_acc=False, is_async=True)
    if TAIL:
        dots = warpgroup_mma(query_tail, tail.permute((1, 0)), dots, is_async=True)
    return warpgroup_mma_wait(0, deps=(dots,))


@gluon.jit
def _exchanged(notes, noted, turn, mine, SIDE: gl.constexpr):
    """The other group's 64 floats for one's own; a note lies until the turn after the next."""
    place = turn % 2 * 2
    notes.index(place + SIDE).store(mine)
    mbarrier.arrive(noted.index(SIDE), count=1)
    mbarrier.wait(noted.index(1 - SIDE), turn % 2)
    return notes.index(place + (1 - SIDE)).load(mine.type.layout)


@gluon.jit
def _consume(
    shared,
    work,
    parts,
    peaks,
    totals,
    sinks,
    out,
    H: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    MODE: gl.constexpr,
    SINKS: gl.constexpr,
    PIECES: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Group SIDE: logits of tile SIDE of every pair, then half SIDE of the piece's value columns of both tiles."""
    query, query_tail, tiles, tails, weights, notes, full, empty, noted, ready = shared
    named, begin, end, used, run_width, scale, heads, piece = work
    N: gl.constexpr = V // PIECES // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    BY_HEAD: gl.constexpr = gl.SliceLayout(1, LOGITS)
    BY_VALUE_HEAD: gl.constexpr = gl.SliceLayout(1, VALUES)
    dtype: gl.constexpr = query.dtype
    values = tiles._reinterpret(dtype, [4 * PIECES, 64, N], tiles.layout)
    lane = SIDE * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LOGITS))
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
        for at in range(start, stop, 128):
            phase = pair % 2
            pair += 1
            # A zero the compiler does not see through: with it every operand's address is made where it is used, not
            # kept in a register of its own from the start.
            zero = gl.where(scale > 1e30, at, zero)
            mine = _position(named, at + lane, end) >= 0
            mbarrier.wait(full.index(SIDE), phase)
            fence_async_shared()
            logits = _logits(
                query.index(zero),
                tiles.index(zero + SIDE),
                query_tail.index(zero),
                tails.index(zero + SIDE),
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
            weights.index(zero + SIDE).store(weight.to(dtype))
            fence_async_shared()
            mbarrier.arrive(ready.index(SIDE), count=1)
            total = gl.fma(total, fade, gl.sum(weight, axis=1))
            held = held * gl.convert_layout(fade, BY_VALUE_HEAD)[:, None]
            mbarrier.wait(ready.index(0), phase)
            first = values.index(zero + piece * 2 + SIDE)
            going = warpgroup_mma(weights.index(zero), first, held, is_async=True)
            mbarrier.wait(ready.index(1), phase)
            second = values.index(zero + (PIECES + piece) * 2 + SIDE)
            going = warpgroup_mma(weights.index(zero + 1), second, going, is_async=True)
            going = warpgroup_mma_wait(1, deps=(going,))
            mbarrier.arrive(empty.index(0), count=1)
            held = warpgroup_mma_wait(0, deps=(going,))
            mbarrier.arrive(empty.index(1), count=1)
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
        LINES: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
        FLOATS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
        staged = tiles._reinterpret(gl.float32, [V // N, 64, N], FLOATS).index(SIDE)
        staged.store(held)
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
        at = head[:, None] * V + (column + gl.arange(0, N, layout=gl.SliceLayout(0, LINES)))[None, :]
        gl.store(parts + at, staged.load(LINES), mask=(head < heads)[:, None] & (used > begin))
    else:
        head = gl.arange(0, 64, layout=BY_HEAD)
        share = share_of_whole(whole_peak, whole_total, sinks + head, head < heads, SINKS)
        held = held * gl.convert_layout(share, BY_VALUE_HEAD)[:, None]
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
        staged = values.index(SIDE)
        staged.store(held.to(dtype))
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        at = head[:, None] * V + (column + gl.arange(0, N, layout=gl.SliceLayout(0, WIDE)))[None, :]
        gl.store(out + at, staged.load(WIDE), mask=(head < heads)[:, None])


@gluon.jit(do_not_specialize=["W", "run_width", "table_row"])
def attend_pairs(
    q,
    latents,
    topk_indices,
    block_table,
    owners,
    out,
    parts,
    peaks,
    totals,
    sinks,
    W,
    run_width,
    table_row,
    scale,
    PACKED: gl.constexpr,
    MODE: gl.constexpr,
    SINKS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    H: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    PIECES: gl.constexpr,
    SCAN: gl.constexpr,
):
    """Program (query and group of 64 heads, run, piece of the value columns).

    `run_width` is a multiple of 128, or of WHOLE at least W. APART: `parts` float32 `[rows, runs, H, V]`, not
    normalised, and `peaks`, `totals` float32 `[rows, runs, H]`; a run without a position has total 0 and leaves its
    part unwritten. IN_TURN, in one piece: `parts` float32 `[rows, groups, 64 * V]` is where earlier runs wait.
    """
    if MODE == APART:
        gdc_launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    GROUPS: gl.constexpr = (H + 63) // 64
    row = (gl.program_id(0) // GROUPS).to(gl.int64)
    group = (gl.program_id(0) % GROUPS) * 64
    run = gl.program_id(1)
    piece = gl.program_id(2)
    # Packed tokens say whose they are; otherwise row and sequence are one.
    sequence = row
    if PACKED:
        sequence = gl.load(owners + row).to(gl.int64)
    named = topk_indices + row * W
    table = block_table + sequence * table_row
    begin = run * run_width
    end = W
    if MODE == APART:
        end = gl.minimum(begin + run_width, W)

    query = gl.allocate_shared_memory(dtype, [1, 64, V], SHARED)
    tiles = gl.allocate_shared_memory(dtype, [2, 64, V], SHARED)
    if R > V:
        query_tail = gl.allocate_shared_memory(dtype, [1, 64, R - V], SHARED)
        tails = gl.allocate_shared_memory(dtype, [2, 64, R - V], SHARED)
        # Once a tile has its logits its tail is room for their weights.
        weights = tails
    else:
        weights = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
        query_tail = weights
        tails = weights
    notes = gl.allocate_shared_memory(gl.float32, [4, 64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    noted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())

    w = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    position_0 = _position(named, w, end)
    position_1 = _position(named, w + 64, end)
    position_2 = _position(named, w + 128, end)
    position_3 = _position(named, w + 192, end)
    for b in gl.static_range(2):
        mbarrier.init(full.index(b), count=128)
        mbarrier.init(empty.index(b), count=2)
        mbarrier.init(noted.index(b), count=1)
        mbarrier.init(ready.index(b), count=1)
    head = group + gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    column = gl.arange(0, V, layout=gl.SliceLayout(0, GATHER))
    q_at = q + (row * H + head) * R
    there = (head < H)[:, None]
    async_copy.async_copy_global_to_shared(query.index(0), q_at[:, None] + column[None, :], mask=there)
    if R > V:
        behind = V + gl.arange(0, R - V, layout=gl.SliceLayout(0, GATHER))
        async_copy.async_copy_global_to_shared(query_tail.index(0), q_at[:, None] + behind[None, :], mask=there)
    async_copy.commit_group()
    gl.thread_barrier()
    block_0 = _block(table, position_0, BLOCK_SIZE)
    block_1 = _block(table, position_1, BLOCK_SIZE)
    block_2 = _block(table, position_2, BLOCK_SIZE)
    tile, tail = tiles.index(0), tails.index(0)
    _gather(latents, tile, tail, full.index(0), position_0, block_0, R, V, BLOCK_SIZE, GATHER)
    tile, tail = tiles.index(1), tails.index(1)
    _gather(latents, tile, tail, full.index(1), position_1, block_1, R, V, BLOCK_SIZE, GATHER)
    # Lists are padded behind: nothing is done for pairs after the last position.
    flat = gl.arange(0, SCAN, layout=FLAT)
    last = gl.full([SCAN], 0, gl.int32, layout=FLAT)
    for at in range(begin, end, SCAN):
        last = gl.maximum(last, gl.where(_position(named, at + flat, end) >= 0, at + flat + 1, 0))
    used = gl.maximum(gl.max(last, axis=0), begin)
    count = (used - begin + 127) // 128 * 2
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    out += (row * H + group) * V
    if SINKS:
        sinks += group
    left = parts
    right = parts
    if MODE == APART:
        at_head = (row * gl.num_programs(1) + run) * H + group
        peaks += at_head
        totals += at_head
        left += at_head * V
        right = left
    if MODE == IN_TURN:
        left += gl.program_id(0).to(gl.int64) * (64 * V)
        right = left + 32 * V
    shared = (query, query_tail, tiles, tails, weights, notes, full, empty, noted, ready)
    work = (named, begin, end, used, run_width, scale, H - group, piece)
    begun = (w, position_2, position_3, block_2)
    gl.warp_specialize(
        [
            (_produce, (shared, latents, named, table, begun, end, count, R, V, BLOCK_SIZE, GATHER)),
            (_consume, (shared, work, left, peaks, totals, sinks, out, H, R, V, MODE, SINKS, PIECES, 0)),
            (_consume, (shared, work, right, peaks, totals, sinks, out, H, R, V, MODE, SINKS, PIECES, 1)),
        ],
        [4, 4],
        [224, 224],
    )
