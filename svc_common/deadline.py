"""The time a call has left, and how it reaches the calls made on its behalf; knows no service."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from svc_common.errors import DeadlineExceeded


class Deadline:
    """A moment on the monotonic clock, or none."""

    def __init__(self, at_seconds: float | None) -> None:
        self._at_seconds = at_seconds

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """`seconds` from now; None is no deadline."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    @classmethod
    def of(cls, context: grpc.aio.ServicerContext[Any, Any]) -> Deadline:
        """The deadline of the call being served."""
        return cls.after(remaining_seconds(context))

    def remaining(self) -> float | None:
        """Seconds left, never below 0; None without a deadline."""
        return None if self._at_seconds is None else max(0.0, self._at_seconds - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self._at_seconds is not None and time.monotonic() >= self._at_seconds

    def child_timeout(self, at_most_seconds: float | None = None) -> float | None:
        """The timeout, in seconds, of a call made on behalf of this one.

        Raises DeadlineExceeded when nothing is left: dead work is not started.
        """
        left = self.remaining()
        if left == 0.0:
            raise DeadlineExceeded("the deadline passed before the work could start", reason="DEADLINE")
        if left is None or at_most_seconds is None:
            return at_most_seconds if left is None else left
        return min(left, at_most_seconds)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Runs a block until the deadline; then cancels what it awaits and raises DeadlineExceeded."""
        self.child_timeout()
        try:
            async with asyncio.timeout(self.remaining()) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded("the deadline passed", reason="DEADLINE") from None


current_deadline: contextvars.ContextVar[Deadline | None] = contextvars.ContextVar("day0_deadline", default=None)
"""Deadline of the call being served; our channels give it to every call they make. A task that works for several
callers sets it to None at its start."""


def remaining_seconds(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds the caller still waits, never below 0; None when it set no deadline."""
    left: float | None = context.time_remaining()
    return None if left is None else max(0.0, left)
