"""Device code for Hopper of the grouped product of FP8 rows and MXFP4 weights, for many rows an expert.

One program a multiprocessor. A warp of its own brings codes and rows by the copy engine; two groups of four warps share
the rows, and while one's product runs the other decodes its weights for the next step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from day0_kernels.mxfp4_fp8_expert_gemm._gluon_decode import (
    decoded,
    grouped_layout,
    magnitudes,
    prefetch_scales,
    row_layout,
)


@gluon.jit
def _bring(
    x,
    codes,
    tiles,
    live,
    code_steps,
    x_steps,
    full,
    empty,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    STEP_BYTES: gl.constexpr,
):
    """Fills step after step of every tile of this program as soon as both groups have left its place."""
    ACROSS: gl.constexpr = DOUT // (2 * BLOCK_M)
    done = 0
    for place in range(gl.program_id(0), gl.load(live) * ACROSS, gl.num_programs(0)):
        tile = place // ACROSS
        expert = gl.load(tiles + tile * 4)
        first = gl.load(tiles + tile * 4 + 1)
        weight_row = expert * DOUT + place % ACROSS * (2 * BLOCK_M)
        for step in range(K // 128):
            slot = done % STAGES
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), STEP_BYTES)
            tma.async_copy_global_to_shared(x, [first, step * 128], full.index(slot), x_steps.index(slot))
            tma.async_copy_global_to_shared(codes, [weight_row, step * 64], full.index(slot), code_steps.index(slot))
            done += 1


@gluon.jit
def _tile(
    x_scales,
    scales,
    tops,
    out,
    code_steps,
    x_steps,
    lines_of,
    full,
    empty,
    weight_row,
    begin,
    first,
    end,
    done,
    PART: gl.constexpr,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`BLOCK_M` weight rows times up to `BLOCK_N` rows of x; `done` steps were multiplied before."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = K // 128
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    BYTES: gl.constexpr = row_layout(BLOCK_M, WARPS)
    GROUPS: gl.constexpr = gl.SliceLayout(2, grouped_layout(BLOCK_M, WARPS))
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_M, BLOCK_M // 8], [WARPS, 1], [1, 0])
    group_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, GROUPS))
    four = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, GROUPS)), 0)
    scale_places = gl.expand_dims(group_rows * (K // 32), 1) + four
    top_at = tops + weight_row
    scale_at = scales + weight_row * (K // 32)
    prefetch_scales(scale_at, BLOCK_M, K, WARPS)
    base = gl.expand_dims(gl.load(top_at + group_rows).to(gl.int32) - 12, 1)
    scale = gl.load(scale_at + scale_places)
    total = warpgroup_mma_init(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUM))
    for step in range(STEPS):
        slot = (done + step) % STAGES
        next_scale = gl.load(scale_at + gl.minimum(step + 1, STEPS - 1) * 4 + scale_places)
        low, high = magnitudes(scale, base)
        scale = next_scale
        mbarrier.wait(full.index(slot), ((done + step) // STAGES) & 1)
        held = code_steps.index(slot).slice(PART * BLOCK_M, BLOCK_M, 0).load(BYTES)
        left = decoded(held, low, high, BLOCK_M, WARPS, LEFT)
        total = warpgroup_mma(left, x_steps.index(slot).slice(0, BLOCK_N, 0).permute((1, 0)), total, is_async=True)
        made = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        total = warpgroup_mma_init(made)
    sums = warpgroup_mma_wait(0, deps=[total])
    # A value was decoded to 2^(12 - top - 6) of itself, its scale included; byte 0 is 2^-127, a subnormal.
    top = gl.load(top_at + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUM))).to(gl.int32)
    factor = gl.maximum(top << 23, 1 << 22).to(gl.float32, bitcast=True)
    rows = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUM))
    x_scale = gl.load(x_scales + rows, mask=rows < end, other=0.0)
    wide = sums * 0.015625 * gl.expand_dims(factor, 1) * gl.expand_dims(x_scale, 0)
    wide = gl.where(gl.abs(wide) < float("inf"), wide, float("nan"))
    gl.thread_barrier()
    some_lines = lines_of.index(PART).slice(0, BLOCK_N, 0)
    some_lines.permute((1, 0)).store(wide.to(out.dtype.element_ty))
    gl.thread_barrier()
    lines = some_lines.load(LINES)
    line = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
    places = gl.expand_dims(line * DOUT, 1) + gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, LINES)), 0)
    gl.store(out + first.to(gl.int64) * DOUT + begin + places, lines, mask=gl.expand_dims(first + line < end, 1))


@gluon.jit
def _multiply(
    x_scales,
    scales,
    tops,
    tiles,
    out,
    live,
    code_steps,
    x_steps,
    lines_of,
    full,
    empty,
    PART: gl.constexpr,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NARROW: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The first or the second `BLOCK_M` weight rows of each tile; `NARROW` rows of x where there are no more."""
    ACROSS: gl.constexpr = DOUT // (2 * BLOCK_M)
    done = 0
    # fmt: off
    for place in range(gl.program_id(0), gl.load(live) * ACROSS, gl.num_programs(0)):
        tile = place // ACROSS
        expert = gl.load(tiles + tile * 4)
        first = gl.load(tiles + tile * 4 + 1)
        end = gl.load(tiles + tile * 4 + 2)
        begin = place % ACROSS * (2 * BLOCK_M) + PART * BLOCK_M
        weight_row = expert.to(gl.int64) * DOUT + begin
        if end - first > NARROW:
            _tile(x_scales, scales, tops, out, code_steps, x_steps, lines_of, full, empty, weight_row, begin, first,
                  end, done, PART, K, DOUT, BLOCK_M, BLOCK_N, STAGES)
        else:
            _tile(x_scales, scales, tops, out, code_steps, x_steps, lines_of, full, empty, weight_row, begin, first,
                  end, done, PART, K, DOUT, BLOCK_M, NARROW, STAGES)
        done += K // 128
    # fmt: on


@gluon.jit
def many_rows_kernel(
    x,
    x_scales,
    codes,
    scales,
    tops,
    tiles,
    out,
    live,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NARROW: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`2 BLOCK_M` weight rows of a tile's expert times the tile's rows of `x`; nonsense for rows whose `tops` is 255.

    `x` is a descriptor of e4m3 `[N, K]` in the order of `fp8_quantise`, `codes` of uint8 `[E * DOUT, K / 2]`; `K` is a
    multiple of 128, `DOUT` of `2 BLOCK_M`; `live` as `map_kernel` gives it. The sums are `common_kernel`'s, bit for
    bit.
    """
    code_steps = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * BLOCK_M, 64], codes.layout)
    x_steps = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 128], x.layout)
    lines_of = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (x_scales, scales, tops, tiles, out, live, code_steps, x_steps, lines_of, full, empty,
                         0, K, DOUT, BLOCK_M, BLOCK_N, NARROW, STAGES)),
            (_multiply, (x_scales, scales, tops, tiles, out, live, code_steps, x_steps, lines_of, full, empty,
                         1, K, DOUT, BLOCK_M, BLOCK_N, NARROW, STAGES)),
            (_bring, (x, codes, tiles, live, code_steps, x_steps, full, empty,
                      K, DOUT, BLOCK_M, STAGES, BLOCK_N * 128 + BLOCK_M * 128)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
