"""Lets backends answer for a CUDA device that this machine does not have: a description in the place of a question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_capability: ContextVar[tuple[int, int] | None] = ContextVar("described_capability", default=None)


@contextmanager
def described(capability: tuple[int, int] | None) -> Iterator[None]:
    """While open, refusals are those of a device of this compute capability; None asks the real one as ever.

    It is for reports: what is resolved in it must not be launched on anything else.
    """
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def described_capability() -> tuple[int, int] | None:
    """Capability of the device that is described now, None where the real one is meant."""
    return _capability.get()
