"""Device code of the MXFP4 to FP8 conversion: one program, one block of 128 by 128."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_mxfp4 import e4m3_words, magnitude_table


@triton.jit
def convert_kernel(codes, scales, fp8, block_scales, spans, N: tl.constexpr, K: tl.constexpr, LOSSLESS: tl.constexpr):
    """`codes` int32 `[E, N, K / 8]` and `scales` uint8 `[E, N, K / 32]` to `fp8` int32 `[E, N, K / 4]`.

    A block whose span is beyond `LOSSLESS`, or that holds the scale byte 255, becomes NaN throughout; the span of the
    latter is 255.
    """
    ROWS: tl.constexpr = (N + 127) // 128
    COLUMNS: tl.constexpr = (K + 127) // 128
    program = tl.program_id(0)
    expert = (program // (ROWS * COLUMNS)).to(tl.int64)
    row = program // COLUMNS % ROWS * 128 + tl.arange(0, 128)
    column = program % COLUMNS
    line = expert * N + row
    words = column * 16 + tl.arange(0, 16)
    word = tl.load(
        codes + line[:, None] * (K // 8) + words[None, :], mask=(row < N)[:, None] & (words < K // 8)[None, :], other=0
    )
    groups = column * 4 + tl.arange(0, 4)
    inside = (row < N)[:, None] & (groups < K // 32)[None, :]
    scale = tl.load(scales + line[:, None] * (K // 32) + groups[None, :], mask=inside, other=0).to(tl.int32)
    grouped = tl.reshape(word, (128, 4, 4))
    held = tl.max(((grouped & 0x77777777) != 0).to(tl.int32), 2) != 0
    # Groups of zeros count nothing, but 255 is NaN there too.
    held = held | (scale == 255)
    largest = tl.max(tl.where(held, scale, -1))
    smallest = tl.min(tl.where(held, scale, 256))
    empty = largest < 0
    span = tl.where(empty, 0, largest - smallest)
    largest = tl.where(empty, 127, largest)
    span = tl.where(largest == 255, 255, span)
    # The largest exponent gets the shift 6, unless the block's scale would be a subnormal float32.
    bias = tl.maximum(largest - 6, 1)
    tl.store(block_scales + program, (bias << 23).to(tl.float32, bitcast=True))
    tl.store(spans + program, span)
    low, high = magnitude_table(tl.minimum(tl.maximum(scale - bias + 6, -2), 12))
    first, last = e4m3_words(grouped, low[:, :, None], high[:, :, None])
    out = tl.reshape(tl.join(first, last), (128, 32))
    out = tl.where(span > LOSSLESS, 0x7F7F7F7F, out)
    places = column * 32 + tl.arange(0, 32)
    tl.store(
        fp8 + line[:, None] * (K // 4) + places[None, :], out, mask=(row < N)[:, None] & (places < K // 4)[None, :]
    )
