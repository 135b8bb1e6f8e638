"""MXFP4 codes as e4m3 bytes inside Triton kernels, eight codes of one 32-bit word at a time; it knows no operator.

An e4m3 byte holds an e2m1 value times 2^s exactly for s from -8 to 6. For each s the eight magnitudes are a table of
eight bytes, and the hardware's byte permutation looks four of them up at once. The interpreter has no such
instruction; there `permuted_bytes` spells out what it does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED


@triton.jit
def permuted_bytes(low, high, selector):
    """Four bytes of the eight of `high:low`, chosen by the lowest four nibbles of `selector`, each 0 .. 7. Int32."""
    if INTERPRETED:
        out = selector * 0
        for i in tl.static_range(4):
            index = (selector >> (4 * i)) & 7
            byte = (tl.where(index < 4, low, high) >> (8 * (index & 3))) & 255
            out = out | (byte << (8 * i))
        return out
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def magnitude_table(shift):
    """Both halves, int32, of the e4m3 bytes of 0, .5, 1, 1.5 and of 2, 3, 4, 6 times 2^(shift - 6); shift -2 .. 12."""
    step = tl.maximum(shift, 1)
    low = step * 0x08080800 + 0x0C080000
    # Subnormal bytes halve otherwise than normal ones.
    low = tl.where(shift == 0, 0x0C080400, low)
    low = tl.where(shift == -1, 0x06040200, low)
    low = tl.where(shift == -2, 0x03020100, low)
    high = tl.maximum(shift, -1) * 0x08080808 + 0x1C181410
    high = tl.where(shift == -2, 0x0C080604, high)
    return low, high


@triton.jit
def e4m3_words(word, low, high):
    """The e4m3 bytes, int32 each, of the first four and of the last four codes of `word` under a magnitude table."""
    magnitudes = word & 0x77777777
    # The signs of codes 0 and 2 come to a byte's top by the shift, those of 1 and 3 are there.
    raised = word << 4
    first = permuted_bytes(low, high, magnitudes) | (permuted_bytes(raised, word, word * 0 + 0x5140) & -0x7F7F7F80)
    last = permuted_bytes(low, high, magnitudes >> 16) | (permuted_bytes(raised, word, word * 0 + 0x7362) & -0x7F7F7F80)
    return first, last


@triton.jit
def e4m3_codes(byte):
    """The e4m3 bytes uint8 of the low and of the high code of `byte` uint8, each its value times 2^-6."""
    if INTERPRETED:
        low = ((byte & 8) << 4) | ((byte & 7) << 2)
        return low.to(tl.uint8), ((byte & 0x80) | ((byte & 0x70) >> 2)).to(tl.uint8)
    else:
        # Four bytes at a time; 0xEA is (a & b) | c.
        return tl.inline_asm_elementwise(
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
            [byte],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
