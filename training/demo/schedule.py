"""What a run does at each fraction of its time: lengths, learning rate, dense or own choice; it knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from training.demo.catalogue import PICTURE_MIX

TOKENS_PER_STEP = 49_152
IMAGES_PER_STEP = 512
# Rows of pictures, in a run that goes on.
PICTURE_ROWS_IMAGES = 896
WARM_UP_STEPS = 200
CONSTANT_UNTIL = 0.55
LAST_RATE = 0.02


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shape of a step's batch: `rows` rows of `length` tokens and up to `images` pictures."""

    length: int
    rows: int
    images: int


def bucket(length: int, tokens: int = TOKENS_PER_STEP, images: Mapping[int, int] = MappingProxyType({})) -> Bucket:
    """The bucket of a length for about so many tokens; `images` are by length, `IMAGES_PER_STEP` where it has none."""
    return Bucket(length, max(1, tokens // length), images.get(length, IMAGES_PER_STEP))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Time-based: every answer depends on the fraction of the run that is over, 0 to 1.

    `phases` are (until which fraction, lengths taken in turn); `own_topk_from` is where dense attention ends; `images`
    and `mixes` are places for pictures and shares of tasks by length, the defaults where they have none.
    """

    phases: tuple[tuple[float, tuple[int, ...]], ...]
    own_topk_from: float
    peak_rate: float
    tokens: int = TOKENS_PER_STEP
    images: Mapping[int, int] = field(default_factory=dict)
    mixes: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def buckets(self, fraction: float) -> tuple[Bucket, ...]:
        """The buckets taken in turn at this time."""
        lengths = next((lengths for until, lengths in self.phases if fraction < until), self.phases[-1][1])
        return tuple(bucket(length, self.tokens, self.images) for length in lengths)

    def all_buckets(self) -> tuple[Bucket, ...]:
        """Every bucket of the run, each once, in order of appearance."""
        lengths = dict.fromkeys(length for _, lengths in self.phases for length in lengths)
        return tuple(bucket(length, self.tokens, self.images) for length in lengths)

    def combinations(self) -> tuple[tuple[Bucket, bool], ...]:
        """Every bucket with every kind of attention it may meet; a batch can come a little after its phase."""
        found: dict[tuple[Bucket, bool], None] = {}
        start = 0.0
        for until, lengths in self.phases:
            for length in lengths:
                one = bucket(length, self.tokens, self.images)
                if start < self.own_topk_from:
                    found[one, False] = None
                if until > self.own_topk_from - 0.02:
                    found[one, True] = None
            start = until
        return tuple(found)

    def own_topk(self, fraction: float) -> bool:
        """Whether attention follows each layer's own choice."""
        return fraction >= self.own_topk_from

    def rate(self, fraction: float, step: int) -> float:
        """Learning rate: linear warm-up by steps, constant, then linear in time to 2 %."""
        rate = self.peak_rate
        if fraction > CONSTANT_UNTIL:
            over = min(1.0, (fraction - CONSTANT_UNTIL) / (1.0 - CONSTANT_UNTIL))
            rate *= 1.0 + over * (LAST_RATE - 1.0)
        return rate * min(1.0, (step + 1) / WARM_UP_STEPS)


def first_run(peak_rate: float = 2e-3) -> Schedule:
    """From nothing: short rows first, own choice from 60 % of the time, when rows become long."""
    phases = ((0.06, (256,)), (0.15, (512,)), (0.60, (1024,)), (1.0, (2048, 4096)))
    return Schedule(phases, own_topk_from=0.60, peak_rate=peak_rate)


def continued_run(peak_rate: float = 1e-3) -> Schedule:
    """From a trained checkpoint: own choice throughout, every other step on short rows full of pictures."""
    phases = ((0.7, (256, 1024, 256, 2048)), (1.0, (256, 1024, 256, 4096)))
    return Schedule(
        phases,
        own_topk_from=0.0,
        peak_rate=peak_rate,
        images={256: PICTURE_ROWS_IMAGES},
        mixes={256: PICTURE_MIX},
    )


def smoke_run(peak_rate: float = 2e-3) -> Schedule:
    """Every bucket once in a minute: what a real run will meet, for a look at shapes, memory and speed."""
    phases = ((0.15, (256,)), (0.3, (512,)), (0.6, (1024,)), (1.0, (2048, 4096)))
    return Schedule(phases, own_topk_from=0.60, peak_rate=peak_rate)
