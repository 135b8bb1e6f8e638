"""Device code for Hopper of the grouped expert product on MXFP4 weights, for few rows an expert: as they are read.

The same sums as `product_kernel`'s, in the same order. A warp of its own brings codes and terms by the copy engine; the
others decode, and the four groups of 128 columns are four products under way. A program has neighbouring tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def _powers(first, last):
    """`first`, twice and four times that .., below `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def _bytes_layout(rows, warps):
    """`[rows, 16]`, a group's codes: four bytes a thread, where the product's left operand has their values."""
    registers = [[0, 1], [0, 2], [8, 0]] + [[row, 0] for row in _powers(16 * warps, rows)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[row, 0] for row in _powers(16, 16 * warps)], [], [rows, 16])


@gluon.jit
def _bring(
    terms,
    codes,
    tiles,
    live,
    code_steps,
    term_steps,
    full,
    empty,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WIDE: gl.constexpr,
    TERMS: gl.constexpr,
    STAGES: gl.constexpr,
    STEP_BYTES: gl.constexpr,
):
    """Fills step after step of every tile of this program as soon as its place is left."""
    ACROSS: gl.constexpr = DOUT // BLOCK_M
    done = 0
    count = gl.load(live) * ACROSS
    share = gl.cdiv(count, gl.num_programs(0))
    begin = gl.program_id(0) * share
    for place in range(begin, gl.minimum(begin + share, count)):
        tile = place // ACROSS
        expert = gl.load(tiles + tile * 4)
        line = gl.load(tiles + tile * 4 + 1) * TERMS
        weight_row = expert * DOUT + place % ACROSS * BLOCK_M
        for step in range(K // (128 * WIDE)):
            slot = done % STAGES
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), STEP_BYTES)
            tma.async_copy_global_to_shared(
                codes, [weight_row, step * (64 * WIDE)], full.index(slot), code_steps.index(slot)
            )
            for i in gl.static_range(WIDE):
                tma.async_copy_global_to_shared(
                    terms, [line, (step * WIDE + i) * 128], full.index(slot), term_steps.index(slot * WIDE + i)
                )
            done += 1


@gluon.jit
def _group(
    codes,
    term_steps,
    zero,
    GROUP: gl.constexpr,
    BLOCK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    LEFT: gl.constexpr,
):
    """The product, not waited for, of a group of 128 columns' `codes` with its terms, both in shared memory."""
    held = codes.slice(BLOCK * 64 + GROUP * 16, 16, 1).load(_bytes_layout(BLOCK_M, gl.num_warps()))
    # As `triton_mxfp4.e4m3_codes`.
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 sign, magnitude;
        shl.b32 sign, $2, 4;
        and.b32 sign, sign, 0x80808080;
        shl.b32 magnitude, $2, 2;
        lop3.b32 $0, magnitude, 0x1C1C1C1C, sign, 0xEA;
        and.b32 sign, $2, 0x80808080;
        shr.u32 magnitude, $2, 2;
        lop3.b32 $1, magnitude, 0x1C1C1C1C, sign, 0xEA;
        }""",
        "=&r,=&r,r",
        [held],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
    weight = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [BLOCK_M, 32])
    left = gl.convert_layout(weight, LEFT, assert_trivial=True).to(gl.float8e4nv, bitcast=True)
    right = term_steps.permute((1, 0)).slice(GROUP * 32, 32, 0)
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _factor(word, GROUP: gl.constexpr):
    """The scale byte of a group, one of four in a word, as float32's exponent; byte 0 is 2^-127, a subnormal."""
    bits = (word << (23 - 8 * GROUP) if GROUP < 3 else word >> 1) & 0x7F800000
    return gl.expand_dims(gl.maximum(bits, 1 << 22).to(gl.float32, bitcast=True), 1)


@gluon.jit
def _multiply(
    row_scales,
    scales,
    tiles,
    out,
    live,
    code_steps,
    term_steps,
    full,
    empty,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WIDE: gl.constexpr,
    TERMS: gl.constexpr,
    STAGES: gl.constexpr,
):
    STEPS: gl.constexpr = K // (128 * WIDE)
    ACROSS: gl.constexpr = DOUT // BLOCK_M
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N * TERMS, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    sum_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUM))
    zero = gl.zeros([BLOCK_M, BLOCK_N * TERMS], gl.float32, SUM)
    count = gl.load(live) * ACROSS
    share = gl.cdiv(count, gl.num_programs(0))
    start = gl.program_id(0) * share
    done = 0
    for place in range(start, gl.minimum(start + share, count)):
        tile = place // ACROSS
        expert = gl.load(tiles + tile * 4)
        first = gl.load(tiles + tile * 4 + 1)
        end = gl.load(tiles + tile * 4 + 2)
        begin = place % ACROSS * BLOCK_M
        scale_at = scales + (expert.to(gl.int64) * DOUT + begin) * (K // 128) + sum_rows * (K // 128)
        # Scales come a step ahead, past shared memory; those of the rows behind begin their way to L2.
        word, word_behind = gl.load(scale_at), gl.load(scale_at + (WIDE - 1))
        if place % ACROSS < ACROSS - 1:
            _prefetch(scale_at + BLOCK_M * (K // 128), K)
        total = zero
        for step in range(STEPS):
            slot = done % STAGES
            ahead = gl.minimum(step + 1, STEPS - 1) * WIDE
            next_word, next_behind = gl.load(scale_at + ahead), gl.load(scale_at + (ahead + WIDE - 1))
            mbarrier.wait(full.index(slot), (done // STAGES) & 1)
            for wide in gl.static_range(WIDE):
                if wide == 1:
                    word = word_behind
                right = term_steps.index(slot * WIDE + wide)
                codes = code_steps.index(slot)
                part_0 = _group(codes, right, zero, 0, wide, BLOCK_M, LEFT)
                part_1 = _group(codes, right, zero, 1, wide, BLOCK_M, LEFT)
                part_2 = _group(codes, right, zero, 2, wide, BLOCK_M, LEFT)
                part_3 = _group(codes, right, zero, 3, wide, BLOCK_M, LEFT)
                sum_0, sum_1, sum_2, sum_3 = warpgroup_mma_wait(0, deps=[part_0, part_1, part_2, part_3])
                total += sum_0 * _factor(word, 0)
                total += sum_1 * _factor(word, 1)
                total += sum_2 * _factor(word, 2)
                total += sum_3 * _factor(word, 3)
            word, word_behind = next_word, next_behind
            gl.thread_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            done += 1
        # Byte 255 came out as infinity, which no sum loses; it is NaN, as is what float32 cannot hold.
        total = gl.where(gl.abs(total) < float("inf"), total, float("nan"))
        if TERMS == 2:
            one, other = gl.split(gl.reshape(total, [BLOCK_M, BLOCK_N, 2]))
            made = one + other
        else:
            made = total
        MADE: gl.constexpr = made.type.layout
        rows = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, MADE))
        # Decoding left a factor of 2^-6.
        factor = gl.load(row_scales + rows, mask=rows < end, other=0.0) * 64.0
        made = (made * gl.expand_dims(factor, 0)).to(out.dtype.element_ty)
        outputs = gl.arange(0, BLOCK_M, gl.SliceLayout(1, MADE))
        places = gl.expand_dims((rows - first) * DOUT, 0) + gl.expand_dims(outputs, 1)
        gl.store(out + first.to(gl.int64) * DOUT + begin + places, made, mask=gl.expand_dims(rows < end, 0))


@gluon.jit
def _prefetch(scale_at, K: gl.constexpr):
    """Asks for the first 128 bytes of each row's scales, int32 `[K / 128]`."""
    for sector in gl.static_range(0, min(K // 128, 32), 8):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(scale_at + sector).to(gl.int64, bitcast=True)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def few_rows_kernel(
    terms,
    row_scales,
    codes,
    scales,
    tiles,
    out,
    live,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    TERMS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WIDE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`BLOCK_M` weight rows of a tile's expert times the tile's rows of x, `WIDE` times 128 columns a step.

    `terms` is a descriptor of e4m3 `[N * TERMS, K]` as `prepare_kernel` makes them (one or two), `codes` of uint8
    `[E * DOUT, K / 2]`; `scales` int32 `[E, DOUT, K / 128]`. `WIDE` is 1 or 2; `K` is a multiple of 128 of it, `DOUT`
    of `BLOCK_M`. `live` int32 `[1]` tiles are there. A program goes from tile to tile.
    """
    code_steps = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_M, 64 * WIDE], codes.layout)
    term_steps = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * WIDE, BLOCK_N * TERMS, 128], terms.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (row_scales, scales, tiles, out, live, code_steps, term_steps, full, empty,
                         K, DOUT, BLOCK_M, BLOCK_N, WIDE, TERMS, STAGES)),
            (_bring, (terms, codes, tiles, live, code_steps, term_steps, full, empty,
                      K, DOUT, BLOCK_M, WIDE, TERMS, STAGES, WIDE * (BLOCK_M * 64 + BLOCK_N * 128 * TERMS))),
        ],
        [1],
        [24],
    )
    # fmt: on
