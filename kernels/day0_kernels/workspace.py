"""The arena backends take their scratch from, one allocation per device; it does not know what is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from day0_kernels.registry import Resolved
from day0_kernels.spec import ScratchSpec, shape_of

ALIGNMENT_BYTES = 256


class WorkspaceError(RuntimeError):
    """Scratch was asked for that was not declared, is larger than declared, or while another lease is open."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Scratch that no single operator declares, such as what one writes and another reads; `sizes` are the largest."""

    scratch: tuple[ScratchSpec, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes it takes in the arena."""
        return sum(_scratch_bytes(spec, self.sizes) for spec in self.scratch)


def _scratch_bytes(spec: ScratchSpec, sizes: Mapping[str, int]) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    needed = prod(shape_of(spec, sizes)) * dtype.itemsize
    return -(-needed // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Workspace:
    """One arena on one device, as large as the hungriest backend function at the largest sizes.

    Operators of one forward run one after the other, so their scratch shares the same bytes: what a lease finds in
    its views is undefined. `sizes` are the largest dimension sizes by name. `reserved` adds scratch under names of the
    caller's own, each with its own sizes. With `poison` every lease starts as NaN (integers as their largest value),
    which a test uses to find reads before writes.
    """

    def __init__(
        self,
        device: torch.device | str,
        resolved: Iterable[Resolved],
        sizes: Mapping[str, int],
        *,
        reserved: Mapping[str, Reservation] | None = None,
        poison: bool = False,
    ) -> None:
        wanted = {found.operator.name: Reservation(found.scratch, sizes) for found in resolved}
        for name, reservation in (reserved or {}).items():
            if name in wanted:
                raise WorkspaceError(f"{name} is an operator, scratch cannot be reserved under its name")
            wanted[name] = reservation
        self._declared = {name: reservation.scratch for name, reservation in wanted.items()}
        self._largest = {name: reservation.size_bytes for name, reservation in wanted.items()}
        self.capacity_bytes = max(self._largest.values(), default=0)
        self.high_water_bytes = 0
        self._poison = poison
        self._holder: str | None = None
        self._arena = torch.empty(self.capacity_bytes, dtype=torch.uint8, device=device)

    @contextmanager
    def lease(self, operator: str, sizes: Mapping[str, int]) -> Iterator[Mapping[str, Tensor]]:
        """Named views of the arena for one call of `operator`, or for a reserved name; they die with the lease.

        The views have the shapes for `sizes`. Errors: WorkspaceError for a name without declared scratch, for sizes
        beyond the declared ones (names the bytes needed and reserved), and for a lease inside another.
        """
        if operator not in self._declared:
            raise WorkspaceError(f"{operator} declared no scratch here, known are {sorted(self._declared)}")
        if self._holder is not None:
            raise WorkspaceError(f"{operator} asked for scratch while {self._holder} holds the workspace")
        needed = sum(_scratch_bytes(spec, sizes) for spec in self._declared[operator])
        if needed > self._largest[operator]:
            raise WorkspaceError(
                f"{operator} needs {needed} bytes of scratch, {self._largest[operator]} are reserved for it"
            )
        self._holder = operator
        try:
            yield self._views(self._declared[operator], sizes)
        finally:
            self._holder = None

    def _views(self, specs: tuple[ScratchSpec, ...], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        views, begin = {}, 0
        for spec in specs:
            dtype: torch.dtype = getattr(torch, spec.dtype)
            shape = shape_of(spec, sizes)
            view = self._arena[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            if self._poison:
                view.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
            views[spec.name] = view
            begin += _scratch_bytes(spec, sizes)
        self.high_water_bytes = max(self.high_water_bytes, begin)
        return views
