"""Which rows and which expert each tile of a grouped product has, found on the device; it knows no product.

Rows lie sorted by expert. A tile has up to a fixed number of rows of one expert, an expert's last tile may have fewer,
and no launch waits to learn how many tiles there are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def new_tiles(expert_offsets: Tensor, rows: int, tile_rows: int) -> Tensor:
    """Room int32 `[tiles, 4]` for as many as there can be: an expert with rows has at most one that is not full."""
    experts = len(expert_offsets) - 1
    return expert_offsets.new_empty(min(rows, experts) + rows // tile_rows, 4)


def padded_experts(experts: int) -> int:
    """`E_PAD` of the kernels, a power of two."""
    return 1 << (experts - 1).bit_length()


@triton.jit
def find_tile(tile, expert_offsets, tiles, E: tl.constexpr, E_PAD: tl.constexpr, TILE_ROWS: tl.constexpr):
    """One row of `tiles` int32 `[tiles, 4]`: expert (-1: no tile), first row, end of the expert's rows."""
    experts = tl.arange(0, E_PAD)
    begins = tl.load(expert_offsets + experts, mask=experts < E, other=0)
    ends = tl.load(expert_offsets + experts + 1, mask=experts < E, other=0)
    counts = (ends - begins + TILE_ROWS - 1) // TILE_ROWS
    behind = tl.cumsum(counts, 0)
    mine = (experts < E) & (behind > tile) & (behind - counts <= tile)
    tl.store(tiles + tile * 4, tl.max(tl.where(mine, experts, -1), 0))
    tl.store(tiles + tile * 4 + 1, tl.sum(tl.where(mine, begins + (tile - behind + counts) * TILE_ROWS, 0), 0))
    tl.store(tiles + tile * 4 + 2, tl.sum(tl.where(mine, ends, 0), 0))


@triton.jit
def tile_kernel(expert_offsets, tiles, E: tl.constexpr, E_PAD: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Each program finds a tile."""
    find_tile(tl.program_id(0), expert_offsets, tiles, E, E_PAD, TILE_ROWS)
