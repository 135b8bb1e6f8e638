"""Device code of the grouped expert product on MXFP4 weights: rows into e4m3 terms, a map of tiles, the product."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_mxfp4 import e4m3_codes
from day0_kernels.triton_rounding import e4m3_of, float32_of, rounded_to


@triton.jit(do_not_specialize=["N"])
def prepare_kernel(
    x,
    expert_offsets,
    terms,
    row_scales,
    tiles,
    live,
    N,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The first N programs split a row of `x [N, K]`, each of the others finds what one tile covers.

    `terms` e4m3 `[N, TERMS, K]` add up to the row times a power of two, 1 / `row_scales [N]`; of 32 columns
    the even ones lie before the odd ones, as the two codes of a byte are decoded. `tiles` int32 `[tiles, 4]`: expert
    (-1: no tile), first row, end of the expert's rows. `live` int32 `[1]`: how many are tiles, the first ones.
    """
    program = tl.program_id(0)
    if program < N:
        _split_row(x, terms, row_scales, program.to(tl.int64), K, TERMS, BLOCK_K)
    else:
        tile = program - N
        experts = tl.arange(0, E_PAD)
        begins = tl.load(expert_offsets + experts, mask=experts < E, other=0)
        ends = tl.load(expert_offsets + experts + 1, mask=experts < E, other=0)
        counts = (ends - begins + BLOCK_N - 1) // BLOCK_N
        behind = tl.cumsum(counts, 0)
        mine = (experts < E) & (behind > tile) & (behind - counts <= tile)
        expert = tl.max(tl.where(mine, experts, -1), 0)
        first = tl.sum(tl.where(mine, begins + (tile - behind + counts) * BLOCK_N, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        tl.store(tiles + tile * 4, expert)
        tl.store(tiles + tile * 4 + 1, first)
        tl.store(tiles + tile * 4 + 2, end)
        if tile == 0:
            tl.store(live, tl.sum(counts, 0))


@triton.jit
def _split_row(x, terms, row_scales, row, K: tl.constexpr, TERMS: tl.constexpr, BLOCK_K: tl.constexpr):
    columns = tl.arange(0, BLOCK_K)
    held = float32_of(tl.load(x + row * K + columns, mask=columns < K, other=0.0))
    peak = tl.max(tl.abs(held), 0)
    for k in range(BLOCK_K, K, BLOCK_K):
        more = float32_of(tl.load(x + row * K + k + columns, mask=k + columns < K, other=0.0))
        peak = tl.maximum(peak, tl.max(tl.abs(more), 0))
    # The largest magnitude comes to 128 .. 256. Limits keep the power and its inverse normal float32.
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 8), 254)
    power = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(row_scales + row, ((exponent - 7) << 23).to(tl.float32, bitcast=True))
    _store_terms(terms + row * (K * TERMS), held * power, 0, K, TERMS, BLOCK_K)
    for k in range(BLOCK_K, K, BLOCK_K):
        more = float32_of(tl.load(x + row * K + k + columns, mask=k + columns < K, other=0.0))
        _store_terms(terms + row * (K * TERMS), more * power, k, K, TERMS, BLOCK_K)


@triton.jit
def _store_terms(terms, rest, k, K: tl.constexpr, TERMS: tl.constexpr, BLOCK_K: tl.constexpr):
    # e4m3 has no infinity: it would become 448.
    rest = tl.where(tl.abs(rest) < 512.0, rest, float("nan"))
    even, odd = tl.split(tl.reshape(rest, (BLOCK_K // 2, 2)))
    pairs = k // 2 + tl.arange(0, BLOCK_K // 2)
    places = pairs // 16 * 32 + pairs % 16
    for term in tl.static_range(TERMS):
        held_even, held_odd = e4m3_of(even), e4m3_of(odd)
        tl.store(terms + places + term * K, held_even, mask=pairs < K // 2)
        tl.store(terms + places + term * K + 16, held_odd, mask=pairs < K // 2)
        even, odd = even - held_even.to(tl.float32), odd - held_odd.to(tl.float32)


@triton.jit
def product_kernel(
    terms,
    row_scales,
    codes,
    scales,
    tiles,
    out,
    K: tl.constexpr,
    DOUT: tl.constexpr,
    TERMS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """`BLOCK_M` weight rows of the tile's expert times the tile's rows of x, `GROUPS` groups of 32 columns at a time.

    `codes` uint8 `[E, DOUT, K / 2]`; `scales` are integers of `GROUPS` bytes, `[E, DOUT, K / 32 / GROUPS]`. The weights
    are the product's left operand, decoded in registers to e4m3 bytes; each group is one instruction deep (32 columns),
    its product is multiplied by the group's scale in float32 and added up there: any scale byte is exact, and the
    narrow accumulator of e4m3 products never holds more than a group. A row's terms are neighbouring columns of the
    product and added to each other at the end.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    outputs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_rows = expert * DOUT + tl.minimum(outputs, DOUT - 1)
    rows = first + tl.arange(0, BLOCK_N)
    inside = rows < end
    lines = first * TERMS + tl.arange(0, BLOCK_N * TERMS)
    STEPS: tl.constexpr = K // (32 * GROUPS)
    code_at = codes + weight_rows[:, None] * (K // 2) + tl.arange(0, 16 * GROUPS)[None, :]
    scale_at = scales + weight_rows * STEPS
    term_at = terms + lines.to(tl.int64)[None, :] * K + tl.arange(0, 32)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N * TERMS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        byte = tl.load(code_at + step * (16 * GROUPS))
        scale = tl.load(scale_at + step).to(tl.int32)
        for group in tl.static_range(GROUPS):
            low, high = e4m3_codes(_group_of(byte, group, GROUPS, BLOCK_M))
            weight = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BLOCK_M, 32))
            x = tl.load(term_at + (step * GROUPS + group) * 32, mask=(lines < end * TERMS)[None, :], other=0.0)
            part = tl.dot(weight.to(tl.float8e4nv, bitcast=True), x)
            # A scale byte as float32's exponent; byte 0 is 2^-127, a subnormal.
            bits = (scale << (23 - 8 * group) if group < 3 else scale >> 1) & 0x7F800000
            factor = tl.maximum(bits, 1 << 22).to(tl.float32, bitcast=True)
            total += part * factor[:, None]
    # Byte 255 came out as infinity, which no sum loses; it is NaN, as is what float32 cannot hold.
    total = tl.where(tl.abs(total) < float("inf"), total, float("nan"))
    total = _sum_of_terms(total, TERMS, BLOCK_M, BLOCK_N)
    # Decoding left a factor of 2^-6.
    factor = tl.load(row_scales + rows, mask=inside, other=0.0) * 64.0
    total = total * factor[None, :]
    tl.store(
        out + rows.to(tl.int64)[None, :] * DOUT + outputs[:, None],
        rounded_to(total, out.dtype.element_ty),
        mask=inside[None, :] & (outputs < DOUT)[:, None],
    )


@triton.jit
def _sum_of_terms(total, TERMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`[BLOCK_M, BLOCK_N]` of `[BLOCK_M, BLOCK_N * TERMS]`."""
    if TERMS == 1:
        return total
    elif TERMS == 2:
        first, second = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N, 2)))
        return first + second
    else:
        first, second = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N, 2, 2)))
        both = first + second
        first, second = tl.split(both)
        return first + second


@triton.jit
def _group_of(byte, group: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The 16 columns of one group of `byte [BLOCK_M, 16 * GROUPS]`; a choice of registers, no instruction."""
    if GROUPS == 1:
        return byte
    elif GROUPS == 2:
        even, odd = tl.split(tl.permute(tl.reshape(byte, (BLOCK_M, 2, 16)), (0, 2, 1)))
        return even if group == 0 else odd
    else:
        pairs = tl.reshape(tl.permute(tl.reshape(byte, (BLOCK_M, 4, 16)), (0, 2, 1)), (BLOCK_M, 16, 2, 2))
        even, odd = tl.split(pairs)
        first, last = tl.split(even if group % 2 == 0 else odd)
        return first if group < 2 else last
