"""Device code of sparse latent attention over FP8 rows for Hopper's warp group products, in Gluon; not interpreted.

As in `sparse_mla`, but that four producing warps read codes into registers, widen them and write the tiles, while the
consumers of `_triton_consume` multiply the ones before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from day0_kernels.fp8_sparse_mla._triton_consume import TILE, consume
from day0_kernels.sparse_mla._triton_hopper import APART, IN_TURN, _block, _position

# Rows that are widened at a time, and how often in a tile.
_ROWS = gl.constexpr(8)
_STEPS = gl.constexpr(4)


@gluon.jit
def _codes_of(word):
    """Float32 of the four e4m3 codes of an int32, lowest byte first."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 lower, upper;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 lower, low;
            cvt.rn.f16x2.e4m3x2 upper, high;
            mov.b32 {a, b}, lower;
            mov.b32 {c, d}, upper;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
        }
        """,
        "=f,=f,=f,=f,r",
        [word],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _slot(position, block, BLOCK_SIZE: gl.constexpr):
    return gl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@gluon.jit
def _fetch_ahead(words, slot, ROW_BYTES: gl.constexpr):
    """Asks for rows to be brought to L2; one that is not there is asked for as the first."""
    address = (words + gl.maximum(slot, 0).to(gl.int64) * (ROW_BYTES // 4)).to(gl.int64)
    size = gl.full(address.shape, ROW_BYTES, gl.int32, layout=address.type.layout)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _codes(words, slot, V: gl.constexpr, ROW_BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    """Codes int32 `[rows, V / 8, 2]`."""
    there = gl.expand_dims(gl.expand_dims(slot >= 0, 1), 2)
    place = gl.expand_dims(gl.expand_dims(slot.to(gl.int64) * (ROW_BYTES // 4), 1), 2)
    pair = gl.expand_dims(gl.arange(0, V // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    word = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0)
    return gl.load(words + (place + (gl.expand_dims(pair, 2) * 2 + gl.expand_dims(word, 1))), mask=there, other=0)


@gluon.jit
def _factor(words, slot, V: gl.constexpr, ROW_BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    """A scale float32 `[rows, V / 8]` for each pair of words."""
    there = gl.expand_dims(slot >= 0, 1)
    place = gl.expand_dims(slot.to(gl.int64) * (ROW_BYTES // 4), 1)
    pair = gl.expand_dims(gl.arange(0, V // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    return gl.load(words + place + (V // 4 + pair // 16), mask=there, other=0).to(gl.float32, bitcast=True)


@gluon.jit
def _widened(codes, factor, V: gl.constexpr, dtype: gl.constexpr):
    a, b, c, d = _codes_of(codes)
    factor = gl.expand_dims(factor, 2)
    a, b, c, d = (a * factor).to(dtype), (b * factor).to(dtype), (c * factor).to(dtype), (d * factor).to(dtype)
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([_ROWS, V])


@gluon.jit
def _produce(
    shared,
    cache,
    named,
    table,
    begin,
    end,
    count,
    R: gl.constexpr,
    V: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW_BYTES: gl.constexpr,
):
    """Widens tiles 0 to `count`, in steps whose codes are read four ahead.

    Slots of a round of four tiles are found, and its rows asked for, a round ahead.
    """
    _query, _query_tail, tiles, tails, _weights, _notes, full, empty, _noted, _ready = shared
    words, halves, slots = cache
    # Eight bytes a thread: the sixteen it makes of them lie in shared memory without a bank used twice.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = tiles.dtype
    rounds = slots._reinterpret(gl.int32, [2, 128], slots.layout)
    far = begin + gl.arange(0, 128, layout=FLAT)
    position = _position(named, far, end)
    far_position = _position(named, far + 128, end)
    rounds.index(0).store(_slot(position, _block(table, position, BLOCK_SIZE), BLOCK_SIZE))
    far_block = _block(table, far_position, BLOCK_SIZE)
    gl.thread_barrier()
    first = slots.index(0)
    codes_0 = _codes(words, first.slice(0, _ROWS).load(BY_ROW), V, ROW_BYTES, LAYOUT)
    codes_1 = _codes(words, first.slice(1 * _ROWS, _ROWS).load(BY_ROW), V, ROW_BYTES, LAYOUT)
    codes_2 = _codes(words, first.slice(2 * _ROWS, _ROWS).load(BY_ROW), V, ROW_BYTES, LAYOUT)
    codes_3 = _codes(words, first.slice(3 * _ROWS, _ROWS).load(BY_ROW), V, ROW_BYTES, LAYOUT)
    factor = _factor(words, first.slice(0, _ROWS).load(BY_ROW), V, ROW_BYTES, LAYOUT)
    behind = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    for t in range(0, count):
        b = t % 4
        if b == 0:
            far_slot = _slot(far_position, far_block, BLOCK_SIZE)
            rounds.index((t // 4 + 1) % 2).store(far_slot)
            _fetch_ahead(words, far_slot, ROW_BYTES)
            far_position = _position(named, far + (t * 32 + 256), end)
            gl.thread_barrier()
        if b == 2:
            far_block = _block(table, far_position, BLOCK_SIZE)
        mbarrier.wait(empty.index(b), (t // 4 + 1) % 2)
        if R > V:
            slot = slots.index(t % 8).load(gl.SliceLayout(1, GATHER))
            there = gl.expand_dims(slot >= 0, 1)
            place = slot.to(gl.int64) * (ROW_BYTES // 2) + (V + V // 32) // 2
            tail_at = halves + gl.expand_dims(place, 1) + gl.expand_dims(behind, 0)
            if dtype == gl.bfloat16:
                async_copy.async_copy_global_to_shared(tails.index(b), tail_at, mask=there)
                async_copy.commit_group()
            else:
                tails.index(b).store(gl.load(tail_at, mask=there, other=0.0).to(dtype))
        for step in gl.static_range(_STEPS):
            later = slots.index((t + (step + 1) // _STEPS) % 8).slice((step + 1) % _STEPS * _ROWS, _ROWS)
            factor_1 = _factor(words, later.load(BY_ROW), V, ROW_BYTES, LAYOUT)
            tiles.index(b).slice(step * _ROWS, _ROWS, dim=0).store(_widened(codes_0, factor, V, dtype))
            factor = factor_1
            codes_0 = codes_1
            codes_1 = codes_2
            codes_2 = codes_3
            later = slots.index((t + (step + 4) // _STEPS) % 8).slice((step + 4) % _STEPS * _ROWS, _ROWS)
            codes_3 = _codes(words, later.load(BY_ROW), V, ROW_BYTES, LAYOUT)
        if R > V:
            async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(b), count=1)


@gluon.jit(do_not_specialize=["W", "run_width", "table_row"])
def attend_pairs(
    q,
    words,
    halves,
    topk_indices,
    block_table,
    owners,
    out,
    parts,
    peaks,
    totals,
    W,
    run_width,
    table_row,
    scale,
    PACKED: gl.constexpr,
    MODE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    H: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    ROW_BYTES: gl.constexpr,
    PIECES: gl.constexpr,
    SCAN: gl.constexpr,
):
    """As `attend_pairs` of `sparse_mla`; `words` and `halves` are the cache as int32 and bfloat16."""
    if MODE == APART:
        gdc_launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 16, rank=2)
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
    tiles = gl.allocate_shared_memory(dtype, [4, TILE, V], SHARED)
    if R > V:
        query_tail = gl.allocate_shared_memory(dtype, [1, 64, R - V], SHARED)
        tails = gl.allocate_shared_memory(dtype, [4, TILE, R - V], SHARED)
        # Once a tile has its logits its tail is room for their weights.
        weights = tails._reinterpret(dtype, [4, 64, TILE], NARROW)
    else:
        weights = gl.allocate_shared_memory(dtype, [4, 64, TILE], NARROW)
        query_tail = weights
        tails = weights
    notes = gl.allocate_shared_memory(gl.float32, [4, 64], PLAIN)
    slots = gl.allocate_shared_memory(gl.int32, [8, TILE], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    noted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(4):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=2)
    for b in gl.static_range(2):
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
    # Lists are padded behind: nothing is done for pairs after the last position.
    flat = gl.arange(0, SCAN, layout=FLAT)
    last = gl.full([SCAN], 0, gl.int32, layout=FLAT)
    for at in range(begin, end, SCAN):
        last = gl.maximum(last, gl.where(_position(named, at + flat, end) >= 0, at + flat + 1, 0))
    used = gl.maximum(gl.max(last, axis=0), begin)
    count = (used - begin + 2 * TILE - 1) // (2 * TILE) * 2
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    out += (row * H + group) * V
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
    cache = (words, halves, slots)
    gl.warp_specialize(
        [
            (_produce, (shared, cache, named, table, begin, end, count, R, V, BLOCK_SIZE, ROW_BYTES)),
            (consume, (shared, work, left, peaks, totals, out, H, R, V, MODE, PIECES, 0)),
            (consume, (shared, work, right, peaks, totals, out, H, R, V, MODE, PIECES, 1)),
        ],
        [4, 4],
        [200, 200],
    )
