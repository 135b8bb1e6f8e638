"""Device code for Hopper of the MXFP4 to FP8 conversion where blocks are whole: no value changes threads on its way.

A thread reads 16 codes, 8 bytes, and writes their 16 bytes; a warp's reads and writes are whole lines.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from day0_kernels.triton_mxfp4 import e4m3_words, magnitude_table


@gluon.constexpr_function
def _powers(first, last):
    """`first`, twice and four times that .., below `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def _words_layout(blocks, warps):
    """`[128, blocks, 4, 4]`: rows, blocks, groups of a block, words of a group; a thread has two neighbouring words."""
    lanes = [[0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0]] + [[0, block, 0, 0] for block in _powers(1, blocks)]
    row = 1
    while len(lanes) < 5:
        lanes.append([row, 0, 0, 0])
        row *= 2
    at_warps = [[more, 0, 0, 0] for more in _powers(row, row * warps)]
    registers = [[0, 0, 0, 1]] + [[more, 0, 0, 0] for more in _powers(row * warps, 128)]
    return gl.DistributedLinearLayout(registers, lanes, at_warps, [], [128, blocks, 4, 4])


@gluon.constexpr_function
def _written_layout(blocks, warps):
    """The same with two words for each, `[128, 32 * blocks]`."""
    words = _words_layout(blocks, warps)
    registers, lanes, at_warps = (
        [[row, 32 * block + 8 * group + 2 * word] for row, block, group, word in bases]
        for bases in (words.reg_bases, words.lane_bases, words.warp_bases)
    )
    return gl.DistributedLinearLayout([[0, 1], *registers], lanes, at_warps, [], [128, 32 * blocks])


@gluon.jit
def convert_whole_kernel(
    codes,
    scales,
    fp8,
    block_scales,
    spans,
    N: gl.constexpr,
    K: gl.constexpr,
    LOSSLESS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """As `convert_kernel`, `BLOCKS` blocks of 128 by 128 side by side; `N` a multiple of 128, `K` of 128 `BLOCKS`."""
    WORDS: gl.constexpr = _words_layout(BLOCKS, gl.num_warps())
    WRITTEN: gl.constexpr = _written_layout(BLOCKS, gl.num_warps())
    GROUPS: gl.constexpr = gl.SliceLayout(3, WORDS)
    ACROSS: gl.constexpr = K // (128 * BLOCKS)
    program = gl.program_id(0)
    column = program % ACROSS
    line = (program // ACROSS).to(gl.int64) * 128
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, GROUPS))), 1), 2)
    block = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, GROUPS))), 0), 2)
    group = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, GROUPS))), 0), 1)
    of_four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))
    four = gl.expand_dims(gl.expand_dims(gl.expand_dims(of_four, 0), 1), 2)
    places = gl.expand_dims(row * (K // 8) + block * 16 + group * 4, 3) + four
    word = gl.load(codes + line * (K // 8) + column * (16 * BLOCKS) + places)
    scale_at = scales + line * (K // 32) + column * (4 * BLOCKS)
    scale = gl.load(scale_at + row * (K // 32) + block * 4 + group).to(gl.int32)
    # Groups of zeros count nothing, but 255 is NaN there too.
    held = (gl.max(((word & 0x77777777) != 0).to(gl.int32), 3) != 0) | (scale == 255)
    largest = gl.max(gl.max(gl.where(held, scale, -1), 2), 0)
    smallest = gl.min(gl.min(gl.where(held, scale, 256), 2), 0)
    empty = largest < 0
    span = gl.where(empty, 0, largest - smallest)
    largest = gl.where(empty, 127, largest)
    span = gl.where(largest == 255, 255, span)
    # The largest exponent gets the shift 6, unless the block's scale would be a subnormal float32.
    bias = gl.maximum(largest - 6, 1)
    of_blocks = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))
    at = (program // ACROSS) * (ACROSS * BLOCKS) + column * BLOCKS + of_blocks
    gl.store(block_scales + at, (bias << 23).to(gl.float32, bitcast=True))
    gl.store(spans + at, span)
    shift = scale - gl.expand_dims(gl.expand_dims(bias, 0), 2) + 6
    low, high = magnitude_table(gl.minimum(gl.maximum(shift, -2), 12))
    first, last = e4m3_words(word, gl.expand_dims(low, 3), gl.expand_dims(high, 3))
    fits = gl.expand_dims(gl.expand_dims(gl.expand_dims(span, 0), 2), 3) <= LOSSLESS
    both = gl.join(gl.where(fits, first, 0x7F7F7F7F), gl.where(fits, last, 0x7F7F7F7F))
    out = gl.convert_layout(gl.reshape(both, [128, 32 * BLOCKS]), WRITTEN, assert_trivial=True)
    out_row = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, WRITTEN)) * (K // 4), 1)
    out_column = gl.expand_dims(gl.arange(0, 32 * BLOCKS, gl.SliceLayout(0, WRITTEN)), 0)
    gl.store(fp8 + line * (K // 4) + column * (32 * BLOCKS) + out_row + out_column, out)
