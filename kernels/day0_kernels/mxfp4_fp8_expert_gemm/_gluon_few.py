"""Device code for Hopper of the grouped product of FP8 rows and MXFP4 weights, for few rows an expert: much in flight.

The weights are the left operand of the matrix instruction, decoded in registers while the one before is at work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
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
def common_kernel(
    x,
    x_scales,
    codes,
    scales,
    tops,
    tiles,
    out,
    K: gl.constexpr,
    DOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`BLOCK_M` weight rows of the tile's expert times the tile's rows of `x`; nonsense for rows whose `tops` is 255.

    `K` is a multiple of 256, `DOUT` of `BLOCK_M`; `x` e4m3 `[N, K]` in the order of `fp8_quantise`. 128 columns are a
    step; steps two ahead and more are on their way to shared memory. Nothing is added up outside the tensor cores.
    """
    tile = gl.program_id(1)
    expert = gl.load(tiles + tile * 4).to(gl.int64)
    if expert < 0:
        return
    first = gl.load(tiles + tile * 4 + 1)
    end = gl.load(tiles + tile * 4 + 2)
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = K // 128
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    BYTES: gl.constexpr = row_layout(BLOCK_M, WARPS)
    GROUPS: gl.constexpr = gl.SliceLayout(2, grouped_layout(BLOCK_M, WARPS))
    CODES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    begin = gl.program_id(0) * BLOCK_M
    weight_row = expert * DOUT + begin
    top_at = tops + weight_row
    sum_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUM))
    group_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, GROUPS))
    base = gl.expand_dims(gl.load(top_at + group_rows).to(gl.int32) - 12, 1)
    four = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, GROUPS)), 0)
    scale_at = scales + weight_row * (K // 32)
    scale_places = gl.expand_dims(group_rows * (K // 32), 1) + four
    prefetch_scales(scale_at, BLOCK_M, K, WARPS)
    code_rows = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, CODES)) * (K // 2), 1)
    code_places = code_rows + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, CODES)), 0)
    code_at = codes + weight_row * (K // 2)
    x_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROWS))
    x_places = gl.expand_dims(x_rows * K, 1) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ROWS)), 0)
    x_at = x + first.to(gl.int64) * K
    # What lies in rows that are not copied reaches no row that is stored.
    inside = gl.expand_dims(first + x_rows < end, 1)
    code_steps = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_M, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    x_steps = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 128], gl.NVMMASharedLayout(128, 8, 2))
    for early in gl.static_range(STAGES - 2):
        async_copy.async_copy_global_to_shared(code_steps.index(early), code_at + early * 64 + code_places)
        async_copy.async_copy_global_to_shared(x_steps.index(early), x_at + early * 128 + x_places, mask=inside)
        async_copy.commit_group()
    scale = gl.load(scale_at + scale_places)
    total = warpgroup_mma_init(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUM))
    # Two steps a round: the decoded weights of one are in use while those of the next are made.
    for pair in range(STEPS // 2):
        for odd in gl.static_range(2):
            step = pair * 2 + odd
            async_copy.wait_group(STAGES - 3)
            fence_async_shared()
            gl.thread_barrier()
            held = code_steps.index(step % STAGES).load(BYTES)
            next_scale = gl.load(scale_at + gl.minimum(step + 1, STEPS - 1) * 4 + scale_places)
            low, high = magnitudes(scale, base)
            left = decoded(held, low, high, BLOCK_M, WARPS, LEFT)
            scale = next_scale
            done = warpgroup_mma_wait(0, deps=[total])
            total = warpgroup_mma(left, x_steps.index(step % STAGES).permute((1, 0)), done, is_async=True)
            # Every warp had waited, before the barrier above, for the products that read what is overwritten here.
            ahead = step + STAGES - 2
            async_copy.async_copy_global_to_shared(
                code_steps.index(ahead % STAGES), code_at + ahead * 64 + code_places, mask=ahead < STEPS
            )
            async_copy.async_copy_global_to_shared(
                x_steps.index(ahead % STAGES), x_at + ahead * 128 + x_places, mask=inside & (ahead < STEPS)
            )
            async_copy.commit_group()
    total = warpgroup_mma_wait(0, deps=[total])
    async_copy.wait_group(0)
    # A value was decoded to 2^(12 - top - 6) of itself, its scale included; byte 0 is 2^-127, a subnormal float32.
    top = gl.load(top_at + sum_rows).to(gl.int32)
    factor = gl.maximum(top << 23, 1 << 22).to(gl.float32, bitcast=True)
    rows = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUM))
    x_scale = gl.load(x_scales + rows, mask=rows < end, other=0.0)
    made = total * 0.015625 * gl.expand_dims(factor, 1) * gl.expand_dims(x_scale, 0)
    made = gl.where(gl.abs(made) < float("inf"), made, float("nan")).to(out.dtype.element_ty)
    ACROSS: gl.constexpr = 16 if BLOCK_M >= 128 else BLOCK_M // 8
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [ACROSS, 32 // ACROSS], [1, WARPS], [0, 1])
    lines = gl.convert_layout(made, LINES)
    line = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LINES))
    places = gl.expand_dims(line * DOUT, 0) + gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, LINES)), 1)
    gl.store(out + first.to(gl.int64) * DOUT + begin + places, lines, mask=gl.expand_dims(first + line < end, 0))
