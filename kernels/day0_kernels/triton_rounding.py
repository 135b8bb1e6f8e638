"""Conversions between float formats inside Triton kernels, right under its interpreter too; it knows no operator.

Triton's interpreter truncates float32 to bfloat16, rounds float32 to e4m3 wrongly and computes bfloat16 as garbage. A
kernel therefore goes to float32 with `float32_of` as soon as it has loaded, and back with these, which round by integer
arithmetic where they are interpreted and by the machine's own instruction where they are compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def float32_of(x):
    """Exact float32 of float32, float16 or bfloat16."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def bfloat16_of(x):
    """Nearest bfloat16 of float32, ties to even; NaN stays NaN."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def e4m3_of(x):
    """Nearest e4m3fn of float32, ties to even, beyond 448 is 448; NaN stays NaN."""
    if INTERPRETED:
        return e4m3_bits_of(x).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def e4m3_bits_of(x):
    """The bits uint8 of `e4m3_of` by integer arithmetic alone."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # From 2^-6 on, three mantissa bits stay of 23 and the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below it every code is a multiple of 2^-9: the sum with 2^14 rounds there, its last bits are the code.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < (121 << 23), subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """Float32 as `dtype` (float32, bfloat16 or float16), to nearest even."""
    if dtype == tl.bfloat16:
        return bfloat16_of(x)
    else:
        return x.to(dtype)
