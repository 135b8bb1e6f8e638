"""The fixed sizes that decode steps are made for; knows neither model nor device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Operators size their grids and scratch by the blocks that a table can name: a short table keeps short contexts fast.
NARROWEST_TABLE_TOKENS = 4096
TABLE_STEP = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """A step of `rows` sequences whose block tables have `blocks` entries each."""

    rows: int
    blocks: int


class Buckets:
    """All sizes for up to `most_rows` sequences of up to `most_blocks` blocks; both bounds are sizes themselves."""

    def __init__(self, most_rows: int, most_blocks: int, block_size: int) -> None:
        self.rows = (*(rows for rows in ROWS if rows < most_rows), most_rows)
        widths = []
        width = max(1, NARROWEST_TABLE_TOKENS // block_size)
        while width < most_blocks:
            widths.append(width)
            width *= TABLE_STEP
        self.blocks = (*widths, most_blocks)

    def __iter__(self) -> Iterator[Bucket]:
        """The largest first: what it needs of memory, the smaller ones find again."""
        for blocks in reversed(self.blocks):
            for rows in reversed(self.rows):
                yield Bucket(rows, blocks)

    def smallest(self, rows: int, blocks: int) -> Bucket | None:
        """The smallest bucket that holds so much, None beyond the bounds."""
        fitting_rows = next((size for size in self.rows if size >= rows), None)
        fitting_blocks = next((size for size in self.blocks if size >= blocks), None)
        if fitting_rows is None or fitting_blocks is None:
            return None
        return Bucket(fitting_rows, fitting_blocks)
