"""Refuses, before a weight is read, what the machine's memory cannot hold; counts bytes and knows no tensor."""

from __future__ import annotations

from pathlib import Path

import psutil

from llm_svc.build import LoadError
from llm_svc.settings import LlmSettings
from svc_common.logs import get_logger

_log = get_logger("day0.memory")

_CGROUP = Path("/sys/fs/cgroup")


def check_memory(settings: LlmSettings, weight_bytes: int, cache_bytes: int) -> None:
    """Compares weights, caches and the loading budget with what is available; raises LoadError with the settings."""
    # While weights are read their budget is held beside those already there; the caches come after it has gone.
    needed = weight_bytes + max(cache_bytes, min(settings.load_budget_bytes, weight_bytes))
    available = settings.max_memory_bytes or available_bytes()
    sizes = {"weight_bytes": weight_bytes, "cache_bytes": cache_bytes, "available_bytes": available}
    if needed > available:
        raise LoadError(
            f"memory: weights take {_gib(weight_bytes)} in {settings.dtype}, caches {_gib(cache_bytes)} "
            f"(cache_tokens {settings.cache_tokens}, max_running_sequences {settings.max_running_sequences}, "
            f"max_snapshots {settings.max_snapshots}), {_gib(needed)} at the peak with load_budget_bytes "
            f"{settings.load_budget_bytes}; {_gib(available)} are available. Lower those, or use a smaller dtype"
        )
    _log.info("memory is enough", extra=sizes)


def available_bytes() -> int:
    """What this process may still take: the machine's available memory, or less where a control group bounds it."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
