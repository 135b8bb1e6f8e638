"""The scratch in which a row's scores wait, and the launches that choose from it.

It knows neither keys nor scores; `_triton_gather` and `_triton_choose` are the device code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from day0_kernels.triton_launch import configuration

LARGEST_GROUP = 64
LARGEST_TOP = 32768
MOST_PARTS = 16
# Programs that a large device runs at once.
PROGRAMS = 256
# Candidates that a program holds in registers, or twice as many; up to those no pool is gathered before.
LEAST_LANES = 512
MOST_LANES = 4096
# Pools a step of `gather`; rows are long enough for whole steps.
TILE = 2048
_PLAIN = {"num_warps": 8, "OVERLAP": 0}


def power_of_two(count: int, least: int = 16) -> int:
    """The least power of two that is at least `count` and `least`."""
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Choice:
    """Scratch for `rows` rows of up to `pools` pools, of which `chosen` are taken."""

    rows: int
    pools: int
    chosen: int
    device: torch.device

    @property
    def refusal(self) -> str | None:
        """Why the kernels cannot choose, or None."""
        if self.gathered and self.top > LARGEST_TOP:
            limit = min(LARGEST_TOP * LARGEST_GROUP, 1 << 30)
            return (
                f"pools a sequence must be at most {limit} and topk_tokens // pool_size at most {LARGEST_TOP // 4}, "
                f"are {self.pools} and {self.chosen}"
            )
        return None

    @property
    def gathered(self) -> bool:
        """Whether candidates are gathered before the choice."""
        return self.pools > 2 * self.lanes

    @property
    def lanes(self) -> int:
        """Candidates that are chosen from without reading them again; twice as many at most."""
        return min(power_of_two(2 * self.chosen, LEAST_LANES), MOST_LANES)

    @property
    def largest_group(self) -> int:
        """The most pools a group of any row has, 1 where no row has groups."""
        sizes = (2 << i for i in range(LARGEST_GROUP.bit_length() - 1))
        return max((size for size in sizes if self.gathered and self.pools > 2 * size * self.chosen), default=1)

    @property
    def top(self) -> int:
        """At least the groups of any row."""
        return power_of_two(max(4 * self.chosen, -(-self.pools // self.largest_group) if self.largest_group > 1 else 1))

    @property
    def parts(self) -> int:
        """Programs that gather a row's candidates; its bits do not depend on how many."""
        if not self.gathered:
            return 1
        return min(MOST_PARTS, -(-self.pools // TILE), 1 << max(PROGRAMS // self.rows, 1).bit_length() - 1)

    @property
    def part_pools(self) -> int:
        """Pools a part: whole steps of TILE, or all lanes of the program that chooses among all pools."""
        if not self.gathered:
            return power_of_two(self.pools)
        return -(-self.pools // (self.parts * TILE)) * TILE

    @cached_property
    def orders(self) -> Tensor:
        """Orders int32 `[rows, parts * part_pools]`."""
        return torch.empty(self.rows, self.parts * self.part_pools, dtype=torch.int32, device=self.device)

    @cached_property
    def groups(self) -> Tensor:
        """The highest order of each group int32 `[rows, top]`."""
        columns = self.top if self.largest_group > 1 else 0
        return torch.empty(self.rows, columns, dtype=torch.int32, device=self.device)

    def launch(self, seq_lens: Tensor, out: Tensor, pool_size: int, always_tail: bool) -> None:
        """Writes the chosen positions of each row into `out` int32 `[rows, W]`."""
        from day0_kernels.index_select._triton_choose import choose
        from day0_kernels.index_select._triton_gather import gather

        places = counts = self.orders
        if self.gathered:
            places = torch.empty_like(self.orders)
            counts = torch.empty(self.rows, self.parts, dtype=torch.int32, device=self.device)
            gather[(self.rows, self.parts)](
                self.orders,
                self.groups,
                places,
                counts,
                seq_lens,
                self.orders.stride(0),
                self.groups.stride(0),
                self.part_pools,
                self.chosen,
                P=pool_size,
                PARTS=self.parts,
                LARGEST=self.largest_group,
                TOP=self.top,
                TILE=TILE,
                **self._configuration("gather", self.top),
            )
        lanes = self.lanes if self.gathered else self.part_pools // 2
        choose[(self.rows,)](
            self.orders,
            places,
            counts,
            seq_lens,
            out,
            self.orders.stride(0),
            self.part_pools,
            out.shape[1],
            self.chosen,
            P=pool_size,
            ALWAYS_TAIL=always_tail,
            GATHERED=self.gathered,
            PARTS=self.parts,
            LANES=lanes,
            MEMBERS=power_of_two(self.chosen * pool_size),
            TILE=min(power_of_two(out.shape[1]), 1024),
            **self._configuration("choose", 2 * lanes),
        )

    def _configuration(self, kernel: str, size: int) -> Mapping[str, int]:
        chosen = configuration(__file__, self.device, kernel, size, _PLAIN)
        # Only behind the launch that scores: any other may still use the memory of the result.
        overlaps = chosen["OVERLAP"] and self.pools > self.chosen > 0 and self.device.type == "cuda"
        return {**chosen, "launch_pdl": True} if overlaps else chosen
