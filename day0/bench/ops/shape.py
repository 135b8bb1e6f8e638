"""What one line of the operator table needs: calls, the least work, and how wrong the result is. It times nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """An operator at a size.

    `calls` run it on one input set each and are used in turn, so that inputs do not stay in L2. The floor is the larger
    of `size_bytes` (every input read once, every output written once) at the copy rate and `flops` (a multiply-add is
    two) at the matrix rate of `rate`. `error(result of calls[0])` is relative to float32, or the share of ids that
    differ; above `limit` the shape has no time. `checked` stands for `calls[0]` in the check where a call changes its
    inputs: the same on copies of what it changes, so that a second run has the bits of the first.
    """

    operator: str
    name: str
    calls: Sequence[Call]
    size_bytes: float
    error: Callable[[Any], float]
    limit: float
    flops: float = 0.0
    rate: Literal["bf16", "fp8"] = "bf16"
    checked: Call | None = None
