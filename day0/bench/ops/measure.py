"""Checks one implementation at one shape and then times it; runs in a process of its own, on the current GPU."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from day0.bench.ops.families import Selection, name_of
from day0.bench.ops.row import OURS, Row, floor_of
from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import Call, Ceilings, eager_median_us, median_us, poison

P = ParamSpec("P")
T = TypeVar("T")
POISON_BYTES = 1 << 30
SEED = 0


def shapes_of(module: str) -> list[Callable[[], Shape]]:
    """The thunks of a family; none is called."""
    return list(importlib.import_module(module).shapes())


def count_shapes(module: str) -> int:
    """How many shapes a family has."""
    return len(shapes_of(module))


def _measuring(fn: Callable[P, T]) -> Callable[P, T]:
    """The same random inputs whatever ran before, and all memory given back to the process that runs next."""

    @wraps(fn)
    def measure(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.manual_seed(SEED)
        try:
            with torch.no_grad():
                return fn(*args, **kwargs)
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    return measure


@_measuring
def measure_shape(module: str, place: int, selection: Selection, ceilings: Ceilings, timed: bool) -> Row | None:
    """The row of a family's shape at `place`; None where it is not asked for."""
    shape = shapes_of(module)[place]()
    if not selection.shape(module, shape.operator, shape.name):
        return None
    row = Row(name_of(module), shape.operator, shape.name, OURS)
    return measured(row, shape, ceilings, timed, graph=True)


@_measuring
def measure_peer(module: str, place: int, row: Row, ceilings: Ceilings, timed: bool) -> Row:
    """The row of the peer at `place` among those an adapter has for the operator and shape of our `row`."""
    peer = list(importlib.import_module(module).peers(row.operator, row.shape))[place]
    about = Row(row.family, row.operator, row.shape, peer.who, note=peer.note)
    return measured(about, peer.make(), ceilings, timed, graph=peer.graph)


def measured(about: Row, shape: Shape, ceilings: Ceilings, timed: bool, *, graph: bool) -> Row:
    """`about` with floor, error and, where the result is right and the same bits twice, the median time."""
    floor_us, binds = floor_of(shape.size_bytes, shape.flops, shape.rate, ceilings)
    row = replace(
        about, size_bytes=shape.size_bytes, flops=shape.flops, floor_us=floor_us, binds=binds, limit=shape.limit
    )
    error, same = checked(shape)
    row = replace(row, error=error)
    if not error <= shape.limit:
        return replace(row, wrong=f"error {error:.1e} above {shape.limit:.1e}")
    if not same and about.who == OURS:
        return replace(row, wrong="other bits in a second run")
    if not same:
        row = replace(row, note=f"{row.note}; other bits in a second run".removeprefix("; "))
    if timed and graph:
        try:
            return replace(row, us=median_us(shape.calls))
        except RuntimeError:
            # A call of ours that cannot be captured cannot serve; of a peer it is said and timed plainly.
            if about.who == OURS:
                raise
            torch.cuda.synchronize()
    return replace(row, us=eager_median_us(shape.calls), mode="eager") if timed else row


def checked(shape: Shape) -> tuple[float, bool]:
    """Error of the first input set's result, and whether a second run has its bits; both in memory full of NaN."""
    first: Call = shape.checked or shape.calls[0]
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    poison(POISON_BYTES)
    # Uninitialised memory is NaN as long as this is on; it would be in the times as well.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results = [first() for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    return shape.error(results[0]), same_bits(*results)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results, tensors or sequences of them, agree in every bit."""
    if isinstance(a, Tensor):
        flat = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)
    if isinstance(a, Sequence):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a is None and b is None
