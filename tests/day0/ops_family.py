"""Stand-ins for a family's measurements that need no GPU; the processes of the runner's tests import them by name."""

from __future__ import annotations

import os
from collections.abc import Iterator

from day0.bench.ops.families import Selection
from day0.bench.ops.peers.peer import Peer
from day0.bench.ops.row import OURS, Row
from day0.bench.ops.timing import Ceilings

CEILINGS = Ceilings(4e12, 4.2e12, 8e14, 1.6e15)


def ceilings() -> Ceilings:
    return CEILINGS


def usable() -> None:
    """Nothing is ever lost here."""


def count(module: str) -> int:
    if module.endswith("broken"):
        raise ImportError("no module named triton")
    return 3


def shape(module: str, place: int, selection: Selection, ceilings: Ceilings, timed: bool) -> Row | None:
    """Of three shapes the first is right, the second ends the process, and the third is wrong."""
    assert ceilings == CEILINGS
    if place == 1:
        os._exit(9)
    name = f"batch {place}"
    if not selection.shape(module, "fake_decode", name):
        return None
    wrong = "error 1.0e+00 above 1.0e-02" if place == 2 else None
    us = 10.0 if timed and not wrong else None
    return Row("fake", "fake_decode", name, OURS, 1e6, 0.0, 4.0, error=1e-3, us=us, wrong=wrong)


def peer(module: str, place: int, row: Row, ceilings: Ceilings, timed: bool) -> Row:
    if place == 1:
        raise RuntimeError("all tensors must be on CUDA")
    return Row(row.family, row.operator, row.shape, "other 1.2 fast", error=1e-3, us=15.0 if timed else None)


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Two peers of the first and the last shape; the second one raises."""
    if shape in ("batch 0", "batch 2"):
        for function in ("fast", "refusing"):
            yield Peer("typer", function, lambda: (_ for _ in ()).throw(AssertionError))
