"""Device code that prepares the grouped expert product on FP8 weights: rows into e4m3 terms, and the map of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import e4m3_of, float32_of
from day0_kernels.triton_tiles import find_tile


@triton.jit(do_not_specialize=["N"])
def prepare_kernel(
    x,
    expert_offsets,
    terms,
    scales,
    tiles,
    N,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The first N programs split a row of `x [N, K]`, each of the others finds what one tile covers.

    `terms` e4m3 `[N, 2, K]` add up to the row over `scales` float32 `[N, K / 128]`, powers of two that bring the
    largest of 128 columns to 128 .. 256.
    """
    program = tl.program_id(0)
    if program >= N:
        find_tile(program - N, expert_offsets, tiles, E, E_PAD, TILE_ROWS)
        return
    row = program.to(tl.int64)
    BLOCKS: tl.constexpr = (K + 127) // 128
    for begin in range(0, BLOCKS, GROUPS):
        groups = begin + tl.arange(0, GROUPS)
        columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        held = float32_of(tl.load(x + row * K + columns, mask=columns < K, other=0.0))
        # Limits keep the power and its inverse normal float32.
        exponent = tl.max(held.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 8), 254)
        power = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(
            scales + row * BLOCKS + groups, ((exponent - 7) << 23).to(tl.float32, bitcast=True), mask=groups < BLOCKS
        )
        rest = held * power[:, None]
        # e4m3 has no infinity: it would become 448.
        rest = tl.where(tl.abs(rest) < 512.0, rest, float("nan"))
        first = e4m3_of(rest)
        tl.store(terms + row * (2 * K) + columns, first, mask=columns < K)
        tl.store(terms + row * (2 * K) + K + columns, e4m3_of(rest - first.to(tl.float32)), mask=columns < K)
