"""What each operator must reach and what is aimed at, as data, and whether a row and its peers reach it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from day0.bench.ops.row import Row


@dataclass(frozen=True, slots=True)
class Bound:
    """One condition: `share` of the floor in percent, `us`, `tflops`, or `times` as fast as peers.

    `peers` are words in the peers' names; of each word the fastest peer counts, and their times are added.
    """

    kind: Literal["share", "us", "tflops", "times"]
    value: float
    peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "times":
            return f"{self.value:g}x {' + '.join(self.peers)}"
        unit = {"share": "% of the floor", "us": "µs", "tflops": "TFLOP/s"}[self.kind]
        return f"{self.value:g} {unit}"

    def reached(self, ours: Row, peers: Sequence[Row]) -> bool | None:
        """None where it cannot be said: a peer has no time in this run."""
        if ours.us is None or ours.share is None:
            return False
        if self.kind == "share":
            return ours.share >= self.value
        if self.kind == "us":
            return ours.us <= self.value
        if self.kind == "tflops":
            return (ours.tflops or 0.0) >= self.value
        total = 0.0
        for word in self.peers:
            times = [peer.us for peer in peers if word in peer.who and peer.us is not None]
            if not times:
                return None
            total += min(times)
        return total / ours.us >= self.value


@dataclass(frozen=True, slots=True)
class Goal:
    """Of the shapes of an operator whose whole names match: the least, and what is aimed at."""

    operator: str
    shape: str
    must: tuple[Bound, ...]
    aim: tuple[Bound, ...]

    def matches(self, row: Row) -> bool:
        """Whether it is about this row."""
        return bool(re.fullmatch(self.operator, row.operator) and re.fullmatch(self.shape, row.shape))


def _share(must: float, aim: float) -> tuple[tuple[Bound], tuple[Bound]]:
    return (Bound("share", must),), (Bound("share", aim),)


def _us(must: float, aim: float) -> tuple[tuple[Bound], tuple[Bound]]:
    return (Bound("us", must),), (Bound("us", aim),)


def _times(must: float, aim: float, *peers: str) -> tuple[tuple[Bound], tuple[Bound]]:
    return (Bound("times", must, peers),), (Bound("times", aim, peers),)


GOALS: tuple[Goal, ...] = (
    Goal(r"(fp8_)?index_select_decode", r"32 heads, 128k, batch (32|128)", *_share(75, 92)),
    Goal(
        r"fp8_index_select_prefill",
        r"32 heads, 4k x (64|128)k",
        *_times(1.0, 1.3, "fp8_mqa_logits", "top_k_ragged_transform"),
    ),
    Goal(r"(fp8_)?sparse_mla_decode", r"GLM 64k, batch 1", *_us(20, 8)),
    Goal(r"(fp8_)?sparse_mla_decode", r"GLM 64k, batch 32", *_us(60, 40)),
    Goal(r"(fp8_)?sparse_mla_decode", r"GLM 64k, batch 128", *_us(110, 80)),
    Goal(
        r"(fp8_)?sparse_mla_prefill",
        r"(GLM|DSV3\.2) 4k x \d+k",
        (Bound("tflops", 350),),
        (Bound("times", 0.9, ("flash_mla_sparse_fwd",)),),
    ),
    Goal(
        r"gated_delta_prefill",
        r"KDA 64 heads, [48]k",
        (Bound("times", 1.2, ("chunk_kda",)),),
        (Bound("times", 2.5, ("chunk_kda",)), Bound("times", 1.0, ("flash_kda",))),
    ),
    Goal(r"gated_delta_decode", r"KDA 64 heads, batch (32|128)", *_share(75, 88)),
    Goal(r"mxfp4_(fp8_)?expert_gemm", r".*\b(32|128) tok.*", *_share(70, 93)),
    Goal(r"fp8_expert_(gemm|product)", r".*\b4,?096 tok.*", *_times(0.7, 0.9, "m_grouped contiguous")),
    Goal(
        r"mxfp4_.*expert_gemm.*",
        r".*\b4,?096 tok.*",
        (Bound("times", 2.0, ("triton_kernels",)),),
        (Bound("times", 1.0, ("humming",)),),
    ),
    Goal(r"mxfp4_to_fp8", r".*", *_share(85, 95)),
    Goal(r"hc_pre|hc_post|hc_.*norm|attention_residual.*", r".*\b4,?096 tok.*", *_share(65, 85)),
)


def goal_of(row: Row) -> Goal | None:
    """The first goal about a row, if any."""
    return next((goal for goal in GOALS if goal.matches(row)), None)
