"""One line of the operator table and its arithmetic: floor, what binds, share of it, ratio. It measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from day0.bench.ops.timing import Ceilings

OURS = "day0"


@dataclass(frozen=True, slots=True)
class Row:
    """What one implementation did at one size.

    `who` is `day0`, or a peer with its version. `us` is None where nothing was timed: `wrong` says why, or is None too
    when only the check was asked for. `binds` names the term of the floor that is larger.
    """

    family: str
    operator: str
    shape: str
    who: str
    size_bytes: float = 0.0
    flops: float = 0.0
    floor_us: float = 0.0
    binds: Literal["bytes", "flops"] = "bytes"
    error: float | None = None
    limit: float | None = None
    us: float | None = None
    mode: Literal["graph", "eager"] = "graph"
    note: str = ""
    wrong: str | None = None

    @property
    def ours(self) -> bool:
        """Whether this line is of our own kernel."""
        return self.who == OURS

    @property
    def share(self) -> float | None:
        """The floor over the time, in percent."""
        return None if self.us is None else 100 * self.floor_us / self.us

    @property
    def tflops(self) -> float | None:
        """TFLOP/s, where the shape counts operations."""
        return self.flops / self.us / 1e6 if self.us is not None and self.flops else None

    def to_json(self) -> dict[str, Any]:
        """Every field, and what follows from them."""
        return asdict(self) | {"share_of_floor": self.share, "tflops": self.tflops}


def from_json(document: Mapping[str, Any]) -> Row:
    """The row that `to_json` wrote."""
    return Row(**{name: value for name, value in document.items() if name not in ("share_of_floor", "tflops")})


def floor_of(
    size_bytes: float, flops: float, rate: Literal["bf16", "fp8"], ceilings: Ceilings
) -> tuple[float, Literal["bytes", "flops"]]:
    """The least time in microseconds, and which term gives it: bytes at the copy rate or operations at `rate`."""
    moving = size_bytes / ceilings.copy_bytes_per_second * 1e6
    per_second = ceilings.bf16_flops_per_second if rate == "bf16" else ceilings.fp8_flops_per_second
    computing = flops / per_second * 1e6
    return (moving, "bytes") if moving >= computing else (computing, "flops")


def times_as_fast(ours: Row, peer: Row) -> float | None:
    """How many times as fast as the peer ours is; None where one of them has no time."""
    return None if ours.us is None or peer.us is None else peer.us / ours.us
