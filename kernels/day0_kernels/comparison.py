"""Runs a backend's function on made inputs and compares it with the reference; it knows no operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from day0_kernels.inputs import Inputs
from day0_kernels.spec import FLOAT, Operator, Role, TensorSpec, Tolerance


class Mismatch(AssertionError):
    """A backend broke its specification; the message names the operator, the tensor and the worst element."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one tensor differs: `excess` is the largest `|got - want| - relative * |want| - absolute`, at `index`."""

    name: str
    largest_difference: float
    excess: float
    index: tuple[int, ...]
    got: float
    want: float

    @property
    def within(self) -> bool:
        return self.excess <= 0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every bit agree (NaN equals the same NaN, -0.0 differs from 0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(_bits(a.reshape(-1)), _bits(b.reshape(-1)))


def compare(name: str, got: Tensor, want: Tensor, tolerance: Tolerance) -> Comparison:
    """Compares in float64 by the tolerance of got's dtype; ids must be equal; NaN is right only where NaN is wanted."""
    if got.shape != want.shape:
        raise Mismatch(f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}")
    dtype = str(got.dtype).removeprefix("torch.")
    absolute = tolerance.absolute[dtype] if got.dtype.is_floating_point else 0.0
    relative = tolerance.relative[dtype] if got.dtype.is_floating_point else 0.0
    if got.numel() == 0:
        return Comparison(name, 0.0, -absolute, (), 0.0, 0.0)
    mine, wanted = got.cpu().double().reshape(-1), want.cpu().double().reshape(-1)
    agree = (mine == wanted) | (mine.isnan() & wanted.isnan())
    difference = (mine - wanted).abs().masked_fill(agree, 0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    excess = (difference - (relative * wanted.abs()).nan_to_num(nan=0.0, posinf=0.0) - absolute).masked_fill(
        agree, -absolute
    )
    worst = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
    return Comparison(
        name, float(difference.max()), float(excess[worst]), index, float(mine[worst]), float(wanted[worst])
    )


def run(operator: Operator, fn: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    """Calls `fn` on a copy of the inputs; what it returned and the caches it updated, by name.

    Mismatch where a returned shape or dtype is not the specified one, or a tensor it may only read has changed.
    """
    mine = inputs.copy()
    returned = fn(**mine.tensors, **mine.scalars)
    results = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    if len(results) != len(operator.outputs):
        raise Mismatch(f"{operator.name}: returned {len(results)} tensors, the spec has {len(operator.outputs)}")
    called_in = _float_dtype(operator, inputs)
    for spec, result in zip(operator.outputs, results, strict=True):
        wanted = called_in if spec.dtype == FLOAT else getattr(torch, spec.dtype)
        if result.dtype != wanted:
            raise Mismatch(f"{operator.name}: {spec.name} is {result.dtype}, the spec says {wanted}")
        if result.dim() != len(spec.shape):
            raise Mismatch(f"{operator.name}: {spec.name} has {result.dim()} dimensions, the spec says {spec.shape}")
    for tensor in operator.tensors:
        if tensor.role is not Role.CACHE and not same_bits(mine.tensors[tensor.name], inputs.tensors[tensor.name]):
            raise Mismatch(f"{operator.name}: changed its input {tensor.name}")
    out = {spec.name: result for spec, result in zip(operator.outputs, results, strict=True)}
    return out | {tensor.name: mine.tensors[tensor.name] for tensor in operator.cached}


def _float_dtype(operator: Operator, inputs: Inputs) -> torch.dtype:
    floats: list[TensorSpec] = [tensor for tensor in operator.tensors if tensor.dtype == FLOAT]
    if not floats:
        assert all(tensor.dtype != FLOAT for tensor in operator.outputs), f"{operator.name}: no input gives the dtype"
        return torch.float32
    return inputs.tensors[floats[0].name].dtype


def _tolerance_of(operator: Operator, name: str, called_in: torch.dtype | None) -> Tolerance:
    if called_in is None or name not in operator.judged_as_called:
        return operator.tolerance
    dtype = str(called_in).removeprefix("torch.")
    return Tolerance({"float32": operator.tolerance.absolute[dtype]}, {"float32": operator.tolerance.relative[dtype]})


def judge(
    operator: Operator,
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    called_in: torch.dtype | None = None,
) -> list[Comparison]:
    """Compares every result by the operator's tolerance; Mismatch names the worst element of the first outside.

    `called_in` is the dtype of the call, for results the spec says are judged as called.
    """
    comparisons = [compare(name, got[name], want[name], _tolerance_of(operator, name, called_in)) for name in want]
    for comparison in comparisons:
        if not comparison.within:
            raise Mismatch(
                f"{operator.name}: {comparison.name}{list(comparison.index)} is {comparison.got:.9g}, want "
                f"{comparison.want:.9g} (beyond the tolerance by {comparison.excess:.3g})"
            )
    return comparisons


def judge_backend(
    operator: Operator, fn: Callable[..., Any], reference: Callable[..., Any], inputs: Inputs
) -> list[Comparison]:
    """The whole verdict on one case: right within the tolerance, and the same bits when run twice."""
    got = run(operator, fn, inputs)
    again = run(operator, fn, inputs)
    for name in got:
        if not same_bits(got[name], again[name]):
            raise Mismatch(f"{operator.name}: {name} has other bits in a second run")
    return judge(operator, got, run(operator, reference, inputs), _float_dtype(operator, inputs))
