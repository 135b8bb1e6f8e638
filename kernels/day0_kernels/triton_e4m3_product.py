"""Device code of grouped products of e4m3 rows and e4m3 weights with block scales: many rows an expert, and few.

It knows no operator. A row may be the sum of several e4m3 terms, which lie one behind the other and share its scales.
The tensor cores' sum of e4m3 products keeps some 14 bits: it is brought to float32 every 128 columns, where the scales
change, in the order of the columns whatever the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import rounded_to


@triton.jit(do_not_specialize=["N"])
def many_rows_kernel(
    x,
    x_scales,
    weight,
    block_scales,
    tiles,
    out,
    N,
    K: tl.constexpr,
    DOUT: tl.constexpr,
    TERMS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of `BLOCK_M` rows, the left operand, times `HALVES` (1 or 2) blocks of 128 outputs.

    `x` and `weight` are descriptors of e4m3 `[N, TERMS * K]` and `[E * DOUT, K]`, `x_scales` float32 `[N, K / 128]`.
    Halves share each block of x, and take turns in the registers of the unscaled sums.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 4)
    if expert < 0:
        return
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    BLOCKS: tl.constexpr = (K + 127) // 128
    half = tl.program_id(0) * HALVES
    rows = first + tl.arange(0, BLOCK_M)
    x_scale_at = x_scales + tl.minimum(rows, N - 1).to(tl.int64) * BLOCKS
    weight_row = expert * DOUT + half * 128
    scale_at = block_scales + (expert * ((DOUT + 127) // 128) + half) * BLOCKS
    # The last program of an odd number of blocks has no second one, and reads the first one's scale instead.
    other = BLOCKS if HALVES == 2 and half + 1 < (DOUT + 127) // 128 else 0
    total = tl.zeros((BLOCK_M, 128), tl.float32)
    total_2 = tl.zeros((BLOCK_M, 128), tl.float32)
    for k in tl.range(0, BLOCKS, num_stages=STAGES):
        held = x.load([first, k * 128])
        bits = weight.load([weight_row, k * 128]).T
        x_scale = tl.load(x_scale_at + k)
        part = tl.dot(held, bits)
        if TERMS == 2:
            rest = x.load([first, K + k * 128])
            part = tl.dot(rest, bits, part)
        total += part * (x_scale * tl.load(scale_at + k))[:, None]
        if HALVES == 2:
            bits = weight.load([weight_row + 128, k * 128]).T
            part = tl.dot(held, bits)
            if TERMS == 2:
                part = tl.dot(rest, bits, part)
            total_2 += part * (x_scale * tl.load(scale_at + other + k))[:, None]
    outputs = half * 128 + tl.arange(0, 128)[None, :]
    inside = (rows < end)[:, None]
    at = out + rows.to(tl.int64)[:, None] * DOUT + outputs
    tl.store(at, rounded_to(total, out.dtype.element_ty), mask=inside & (outputs < DOUT))
    if HALVES == 2:
        tl.store(at + 128, rounded_to(total_2, out.dtype.element_ty), mask=inside & (outputs + 128 < DOUT))


@triton.jit
def few_rows_kernel(
    x,
    x_scales,
    weight,
    block_scales,
    tiles,
    out,
    K: tl.constexpr,
    DOUT: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """128 weight rows, the left operand, times a tile of `BLOCK_N` rows of x.

    `x` is e4m3 `[N, TERMS * K]`, the rest as above.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 4)
    if expert < 0:
        return
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    BLOCKS: tl.constexpr = (K + 127) // 128
    columns = tl.arange(0, 128)[:, None]
    outputs = tl.program_id(0) * 128 + tl.arange(0, 128)[:, None]
    rows = first + tl.arange(0, BLOCK_N)
    inside = rows < end
    x_at = x + rows.to(tl.int64)[None, :] * (TERMS * K) + columns
    x_scale_at = x_scales + rows.to(tl.int64) * BLOCKS
    weight_row = expert * DOUT + tl.program_id(0) * 128
    scale_at = block_scales + (expert * ((DOUT + 127) // 128) + tl.program_id(0)) * BLOCKS
    total = tl.zeros((128, BLOCK_N), tl.float32)
    for k in tl.range(0, BLOCKS, num_stages=STAGES):
        bits = weight.load([weight_row, k * 128])
        wanted = inside[None, :] & (columns < K - k * 128) if K % 128 else inside[None, :]
        part = tl.dot(bits, tl.load(x_at + k * 128, mask=wanted, other=0.0))
        if TERMS == 2:
            part = tl.dot(bits, tl.load(x_at + K + k * 128, mask=wanted, other=0.0), part)
        x_scale = tl.load(x_scale_at + k, mask=inside, other=0.0)
        total += part * (x_scale * tl.load(scale_at + k))[None, :]
    at = out + rows.to(tl.int64)[None, :] * DOUT + outputs
    tl.store(at, rounded_to(total, out.dtype.element_ty), mask=inside[None, :] & (outputs < DOUT))
