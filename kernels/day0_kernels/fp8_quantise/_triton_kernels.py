"""Device code of the quantisation of rows to FP8: one program, some columns of one row."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import e4m3_of, float32_of


@triton.jit
def row_kernel(
    x, q, x_scales, K: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    """`BLOCK` columns from `SPAN` times the second program id on, of the row that the first names.

    A group that is not 128 columns is the whole row; then the row's largest is found before any column is rounded.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * SPAN
    columns = begin + tl.arange(0, BLOCK)
    held = float32_of(tl.load(x + row * K + columns, mask=columns < K, other=0.0))
    if GROUP == 128:
        COUNT: tl.constexpr = (K + 127) // 128
        exponent = _exponent(tl.max(_magnitude(tl.reshape(held, (BLOCK // 128, 128))), 1))
        groups = begin // 128 + tl.arange(0, BLOCK // 128)
        tl.store(x_scales + row * COUNT + groups, _power(exponent - 7), mask=groups < COUNT)
        powers = tl.broadcast_to(_power(261 - exponent)[:, None], (BLOCK // 128, 128))
        _store(q + row * K, held * tl.reshape(powers, (BLOCK,)), begin, K, ORDERED, BLOCK)
    else:
        peak = tl.max(_magnitude(held), 0)
        for more in range(BLOCK, K, BLOCK):
            behind = float32_of(tl.load(x + row * K + more + columns, mask=more + columns < K, other=0.0))
            peak = tl.maximum(peak, tl.max(_magnitude(behind), 0))
        exponent = _exponent(peak)
        tl.store(x_scales + row, _power(exponent - 7))
        _store(q + row * K, held * _power(261 - exponent), 0, K, ORDERED, BLOCK)
        for more in range(BLOCK, K, BLOCK):
            behind = float32_of(tl.load(x + row * K + more + columns, mask=more + columns < K, other=0.0))
            _store(q + row * K, behind * _power(261 - exponent), more, K, ORDERED, BLOCK)


@triton.jit
def _magnitude(x):
    """Bits of the absolute value, which rise with it; those of NaN are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _exponent(peak):
    return tl.minimum(tl.maximum(peak >> 23, 8), 254)


@triton.jit
def _power(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store(q, scaled, begin, K: tl.constexpr, ORDERED: tl.constexpr, BLOCK: tl.constexpr):
    # e4m3 has no infinity: it would become 448.
    scaled = tl.where(tl.abs(scaled) < 512.0, scaled, float("nan"))
    bits = e4m3_of(scaled).to(tl.uint8, bitcast=True)
    bits = tl.where(scaled != scaled, 0x7F, bits).to(tl.uint8)
    if ORDERED:
        bits = tl.reshape(bits, (BLOCK // 128, 4, 4, 2, 4))
        bits = tl.reshape(tl.permute(bits, (0, 2, 3, 1, 4)), (BLOCK,))
    places = begin + tl.arange(0, BLOCK)
    tl.store(q + places, bits, mask=places < K)
