"""What a tap is, and how far two values of it may lie apart; knows no family and no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

SUM_DEVIATIONS = 6
"""A sum of n terms is off by more than 6 sqrt(n) eps of its terms with probability below 2 exp(-18): Higham and Mary,
A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41 (2019). Sums are kept in float32."""

ROUNDINGS = 4
"""Between two taps a value is rounded to its dtype at most four times (product, gate, sum, output), by half an eps at
most each time, on both sides: together four eps."""

Record = Mapping[str, Any]
"""What was seen in one layer, by key: `module:in`, `module:out`, `operator:out`, with `#n` for the n-th call."""


class Kind(StrEnum):
    """How a tap is compared."""

    VALUES = "values"
    CHOICE = "choice"
    SAME_CHOICE = "same choice"
    BY_CHOICE = "values of a choice"


class Verdict(StrEnum):
    """What a comparison found."""

    EQUAL = "equal"
    WITHIN = "within"
    TIE = "tie"
    DIVERGES = "diverges"
    UNSEEN = "unseen"

    @property
    def passes(self) -> bool:
        """Whether the two sides agree."""
        return self in (Verdict.EQUAL, Verdict.WITHIN, Verdict.TIE)


@dataclass(frozen=True, slots=True)
class Tap:
    """One semantic point of a layer.

    `operator` is named when the two sides differ here. `native` is a key of our record and `part` the place in a tuple
    there. `upstream` reads the same value, in our order of elements, from upstream's record; None where the layer has
    no such point. `terms` is the length of the longest sum that leads to it, given the text config and the tokens in
    the cache. `scores` of a choice gives what was chosen by, float [T, candidates].
    """

    name: str
    operator: str
    native: str
    upstream: Callable[[Record], Tensor | None]
    terms: Callable[[Any, int], int]
    part: int | None = None
    kind: Kind = Kind.VALUES
    scores: Callable[[Record], Tensor | None] | None = None
    group: int = 1
    """Consecutive positions that one score stands for."""
    forced: bool = True


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tap of one layer in one forward. Errors are relative to the largest upstream value."""

    layer: int | None
    tap: str
    operator: str
    verdict: Verdict
    error: float
    tolerance: float
    note: str = ""
    follows_tie: bool = False


def tolerance(terms: int, dtype: torch.dtype) -> float:
    """Relative to the largest value: the float32 error of a sum of `terms`, and the roundings to `dtype`."""
    summed = SUM_DEVIATIONS * math.sqrt(max(terms, 1)) * torch.finfo(torch.float32).eps
    return summed + ROUNDINGS * torch.finfo(dtype).eps


def accumulated(tolerances: Iterable[float]) -> float:
    """Of operators one after the other: their errors are independent, so they add up as their squares do."""
    return math.sqrt(sum(allowed**2 for allowed in tolerances))


def compare_values(native: Tensor, upstream: Tensor, allowed: float) -> tuple[Verdict, float, str]:
    """Verdict, largest difference over largest upstream value, note; tensors of one number of elements."""
    if native.numel() != upstream.numel():
        return Verdict.DIVERGES, math.inf, f"{list(native.shape)} against {list(upstream.shape)}"
    ours, theirs = native.detach().double().flatten(), upstream.detach().double().flatten()
    if not len(theirs):
        return Verdict.EQUAL, 0.0, ""
    difference = (ours - theirs).abs().max().item()
    largest = theirs.abs().max().item()
    error = difference / largest if largest else (math.inf if difference else 0.0)
    if difference == 0:
        return Verdict.EQUAL, 0.0, ""
    # A NaN is within nothing.
    return (Verdict.WITHIN if error <= allowed else Verdict.DIVERGES), error, ""


def halves_are_swapped(native: Tensor, upstream: Tensor, allowed: float) -> bool:
    """Whether the two would agree with the halves of each row of ours swapped, as gate and up in the wrong order."""
    width = native.shape[-1]
    if width % 2 or native.numel() != upstream.numel():
        return False
    return compare_values(native.roll(width // 2, -1), upstream, allowed)[0].passes


def compare_choice(
    native: Tensor, upstream: Tensor, scores: Tensor, group: int, allowed: float
) -> tuple[Verdict, float, str]:
    """Chosen positions int [T, any] with -1 for none, compared as sets, row by row; order means nothing.

    Where the sets differ, the scores that only one side took have to lie within `allowed` of each other, relative to
    the row's largest: then it is a tie and both are right. The error is the largest such distance. A position without
    a score of its own, as one of the tail, has no tie.
    """
    ties, worst = 0, 0.0
    for row, (ours, theirs) in enumerate(zip(native.tolist(), upstream.tolist(), strict=True)):
        mine, other = {p for p in ours if p >= 0}, {p for p in theirs if p >= 0}
        if mine == other:
            continue
        lone = sorted(mine ^ other)
        note = f"token {row}: only one side takes {', '.join(map(str, lone[:6]))}"
        groups = [position // group for position in lone]
        if len(mine) != len(other) or max(groups) >= scores.shape[1]:
            return Verdict.DIVERGES, math.inf, note
        values = scores[row][groups].double()
        finite = scores[row][scores[row].isfinite()].double()
        spread = (values.max() - values.min()).item() / max(finite.abs().max().item(), 1e-30)
        if not spread <= allowed:
            return Verdict.DIVERGES, spread, note
        ties, worst = ties + 1, max(worst, spread)
    return (Verdict.TIE, worst, f"{ties} tokens choose otherwise at equal scores") if ties else (Verdict.EQUAL, 0.0, "")
