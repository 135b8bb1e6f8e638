"""Where a model runs in this process, as commands let one choose it."""

from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    """The processor, or the process' first GPU."""

    cpu = "cpu"
    cuda = "cuda"
