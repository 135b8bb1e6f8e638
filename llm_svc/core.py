"""The engine's nouns: what a client asked, its running state, and one forward's work; knows no torch and no gRPC."""

from __future__ import annotations

import enum
import itertools
import time
from dataclasses import dataclass, field

import numpy as np


class FinishReason(enum.Enum):
    """Why a sequence ended; ABORT never reaches a client as a finish, only as a status."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen for one request; every value was checked when this was made (`wire.py`)."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One picture of a prompt, still encoded. `index` is its place among the request's images, from 0."""

    index: int
    data: bytes
    label: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A run of prompt ids between images; user text inside it holds no control or placeholder ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptImage:
    """The place of image `index`; it expands to as many placeholder ids as the image has visual tokens."""

    index: int


PromptSegment = PromptTokens | PromptImage


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, converted once. `arrival` is on the monotonic clock, in seconds."""

    request_id: str
    segments: tuple[PromptSegment, ...]
    images: tuple[ImageInput, ...]
    sampling: SamplingParams
    arrival: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token before temperature and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token, with log-probabilities when the request asked for them (best first)."""

    token_id: int
    logprob: float = 0.0
    top: tuple[Logprob, ...] = ()


@dataclass(slots=True)
class VisualTokens:
    """Visual tokens of one image as they arrive.

    `digest` (from the vision service: equal digests mean equal tokens) and `count` are known from the header on; `rows`
    is a float array [count, hidden] once all chunks have arrived and were verified, else None.
    """

    digest: bytes
    count: int
    rows: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Placeholders of one image: prompt positions [start, start + visual.count)."""

    start: int
    visual: VisualTokens

    @property
    def end(self) -> int:
        """First position after the placeholders."""
        return self.start + self.visual.count


@dataclass(frozen=True, slots=True)
class Prompt:
    """A laid-out prompt: ids with placeholders in place, and where each image lies, in order."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()

    @property
    def visual_tokens(self) -> int:
        """Number of placeholder positions."""
        return sum(span.visual.count for span in self.images)


class SequenceStatus(enum.Enum):
    """Where a sequence is: not admitted yet (or preempted), in the running set, or over."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_sequence_ids = itertools.count()


class Sequence:
    """The running state of one choice of a request.

    Owned by the engine's thread. `computed` counts the tokens whose rows are in the caches; `blocks` is the block table
    (physical block ids); `state_slot` is the row of the recurrent states, None while waiting; `block_keys` names the
    content of the full blocks; `answer_snapshot` is the key of the newest snapshot taken while decoding.
    """

    def __init__(self, request: Request, prompt: Prompt, choice: int = 0) -> None:
        self.id = next(_sequence_ids)
        self.request = request
        self.prompt = prompt
        self.choice = choice
        self.status = SequenceStatus.WAITING
        self.output_ids: list[int] = []
        self.computed = 0
        self.cached = 0
        self.blocks: list[int] = []
        self.state_slot: int | None = None
        self.block_keys: list[bytes] = []
        self.answer_snapshot: bytes | None = None
        self.paused = False
        self.preemptions = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None

    def __len__(self) -> int:
        return len(self.prompt.ids) + len(self.output_ids)

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def in_prefill(self) -> bool:
        """Whether tokens besides the newest one still have to be computed."""
        return self.computed < len(self) - 1 or not self.output_ids

    def token_ids(self, start: int, end: int) -> list[int]:
        """Ids at positions [start, end)."""
        length = len(self.prompt.ids)
        ids = list(self.prompt.ids[start:end])
        if end > length:
            ids += self.output_ids[max(0, start - length) : end - length]
        return ids

    def available(self) -> int:
        """Number of leading positions that can be computed now: up to the first image whose rows have not arrived."""
        for span in self.prompt.images:
            if span.end > self.computed and span.visual.rows is None:
                return max(span.start, self.computed)
        return len(self)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one sequence contributes to a forward: positions [start, start + count).

    `samples` says whether the last of them produces a token. `restore` is the snapshot its state slot starts from (None
    with `fresh` set: zeros); `save` is the snapshot that receives the state after the forward.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    fresh: bool = False
    restore: int | None = None
    save: int | None = None

    @property
    def decodes(self) -> bool:
        """Whether this is a decode step rather than a piece of a prefill."""
        return self.samples and self.count == 1 and bool(self.sequence.output_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one forward; decode steps come first."""

    items: tuple[Scheduled, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in the forward."""
        return sum(item.count for item in self.items)

    @property
    def sampled(self) -> tuple[Scheduled, ...]:
        """Items that produce a token, in order."""
        return tuple(item for item in self.items if item.samples)
