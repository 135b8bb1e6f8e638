"""Carries a request's events from the engine's thread to its stream, and says when the reader is too slow."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

from llm_svc.core import FinishReason, SampledToken
from svc_common.errors import ServiceError


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New output of one choice: text that may be shown (possibly none yet) and the tokens it came from."""

    choice: int
    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A choice is over; `stop` is the stop string that ended it."""

    choice: int
    reason: FinishReason
    stop: str | None


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """Token counts; the last event of a request that did not fail."""

    prompt_tokens: int
    cached_tokens: int
    visual_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """The request failed; nothing follows."""

    error: ServiceError


Event = TokenEvent | FinishEvent | UsageEvent | FailureEvent


class OutputChannel:
    """A bounded queue between one request and its stream.

    `push` never blocks: the engine looks at `full` before each step and leaves a full request's sequences out, so at
    most one token of each choice is added beyond `limit_tokens`. Tokens of one choice that wait together are merged.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit_tokens: int = 64) -> None:
        self._loop = loop
        self._limit = limit_tokens
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._waiting_tokens = 0
        self._ready = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the reader has to catch up before more is generated."""
        return self._waiting_tokens >= self._limit

    def push(self, event: Event) -> None:
        """Adds an event; called by the engine's thread, made visible by `wake`."""
        with self._lock:
            last = self._events[-1] if self._events else None
            if isinstance(event, TokenEvent):
                self._waiting_tokens += 1
                if isinstance(last, TokenEvent) and last.choice == event.choice:
                    self._events[-1] = TokenEvent(event.choice, last.text + event.text, last.tokens + event.tokens)
                    return
            self._events.append(event)

    def wake(self) -> None:
        """Lets the reader see what was pushed; runs in the event loop."""
        self._ready.set()

    async def next_events(self) -> tuple[list[Event], bool]:
        """Waits for events and takes all of them; the flag says that this reader may have held up the engine."""
        await self._ready.wait()
        with self._lock:
            events, was_full = list(self._events), self.full
            self._events.clear()
            self._waiting_tokens = 0
            self._ready.clear()
        return events, was_full
