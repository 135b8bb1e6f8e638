"""Device code of the grouped product of FP8 rows and MXFP4 weights that takes any scale byte, group by group."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_mxfp4 import e4m3_codes
from day0_kernels.triton_rounding import rounded_to
from day0_kernels.triton_tiles import find_tile


@triton.jit
def map_kernel(
    expert_offsets,
    tops,
    tiles,
    live,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DOUT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """As `find_tile`; `tiles[.., 3]` is 255 where a row of the expert's weights has no exponent in common.

    `live` int32 `[1]` is the number of tiles that are there; they come first.
    """
    tile = tl.program_id(0)
    if tile == 0:
        experts = tl.arange(0, E_PAD)
        begins = tl.load(expert_offsets + experts, mask=experts < E, other=0)
        ends = tl.load(expert_offsets + experts + 1, mask=experts < E, other=0)
        tl.store(live, tl.sum((ends - begins + TILE_ROWS - 1) // TILE_ROWS, 0))
    find_tile(tile, expert_offsets, tiles, E, E_PAD, TILE_ROWS)
    tl.debug_barrier()
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    largest = tl.zeros((BLOCK_D,), tl.int32)
    if expert >= 0:
        for begin in range(0, DOUT, BLOCK_D):
            rows = begin + tl.arange(0, BLOCK_D)
            largest = tl.maximum(largest, tl.load(tops + expert * DOUT + rows, mask=rows < DOUT, other=0).to(tl.int32))
    tl.store(tiles + tile * 4 + 3, tl.max(largest, 0))


@triton.jit
def reorder_kernel(x, terms, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A row of `x [N, K]` as `few_rows_kernel` takes it: groups of 32 columns behind each other, even columns first."""
    row = tl.program_id(0).to(tl.int64) * K
    for begin in range(0, K, BLOCK_K):
        at = begin + tl.arange(0, BLOCK_K)
        held = tl.reshape(tl.load(x + row + at, mask=at < K), (BLOCK_K // 128, 4, 2, 4, 2, 2))
        # Step, half, group, byte's upper and lower bit; the lower is the column's.
        ordered = tl.reshape(tl.permute(held, (0, 3, 5, 1, 2, 4)), (BLOCK_K,))
        tl.store(terms + row + at, ordered, mask=at < K)


@triton.jit
def group_kernel(
    x,
    x_scales,
    codes,
    scales,
    tops,
    tiles,
    out,
    K: tl.constexpr,
    DOUT: tl.constexpr,
    SHARED_M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`BLOCK_M` weight rows of the tile's expert times the tile's rows of `x`, `BLOCK_N` rows and 32 columns at a time.

    `x` e4m3 `[N, K]` in the order of `fp8_quantise`. Each group's product is multiplied by its scale in float32 and
    added up there, so any scale byte is exact. With `SHARED_M` (a divisor of `DOUT`) a program has that many weight
    rows, and only where one of them has 255 in `tops`: the others are not this kernel's.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    if expert < 0:
        return
    begin = tl.program_id(0) * BLOCK_M
    parts = 1
    if SHARED_M > 0:
        begin = tl.program_id(0) * SHARED_M
        parts = SHARED_M // BLOCK_M
        if tl.load(tiles + tile * 4 + 3) < 255:
            return
        if tl.max(tl.load(tops + expert * DOUT + begin + tl.arange(0, SHARED_M)).to(tl.int32), 0) < 255:
            return
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.minimum(tl.load(tiles + tile * 4 + 2), first + TILE_ROWS)
    for part in range(parts):
        for row in range(first, end, BLOCK_N):
            _product(
                x, x_scales, codes, scales, out, expert, row, end, begin + part * BLOCK_M, K, DOUT, BLOCK_M, BLOCK_N
            )


@triton.jit
def _product(
    x,
    x_scales,
    codes,
    scales,
    out,
    expert,
    first,
    end,
    begin,
    K: tl.constexpr,
    DOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    outputs = begin + tl.arange(0, BLOCK_M)
    weight_rows = expert * DOUT + tl.minimum(outputs, DOUT - 1)
    rows = first + tl.arange(0, BLOCK_N)
    inside = rows < end
    code_at = codes + weight_rows[:, None] * (K // 2) + tl.arange(0, 16)[None, :]
    # Places of a group's columns: step, half and byte of `to_mxfp4_order`.
    places = tl.arange(0, 4)[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 4)[None, None, :]
    x_at = x + rows.to(tl.int64)[:, None, None, None] * K + places[None, :, :, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(K // 32):
        low, high = e4m3_codes(tl.load(code_at + group * 16))
        weight = tl.reshape(tl.join(low, high), (BLOCK_M, 32)).to(tl.float8e4nv, bitcast=True)
        held = tl.load(x_at + (group // 4 * 128 + group % 4 * 4), mask=inside[:, None, None, None], other=0.0)
        part = tl.dot(weight, tl.trans(tl.reshape(held, (BLOCK_N, 32))))
        scale = tl.load(scales + weight_rows * (K // 32) + group).to(tl.int32)
        # A scale byte as float32's exponent; byte 0 is 2^-127, a subnormal.
        total += part * tl.maximum(scale << 23, 1 << 22).to(tl.float32, bitcast=True)[:, None]
    # Byte 255 came out as infinity, which no sum loses; it is NaN, as is what float32 cannot hold.
    total = tl.where(tl.abs(total) < float("inf"), total, float("nan"))
    # Decoding left a factor of 2^-6.
    total = total * (tl.load(x_scales + rows, mask=inside, other=0.0) * 64.0)[None, :]
    tl.store(
        out + rows.to(tl.int64)[None, :] * DOUT + outputs[:, None],
        rounded_to(total, out.dtype.element_ty),
        mask=inside[None, :] & (outputs < DOUT)[:, None],
    )
