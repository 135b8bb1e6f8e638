"""Refuses, before a weight is read, what the memory of machine or GPU cannot hold; counts bytes, knows no tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from llm_svc.build import LoadError
from llm_svc.settings import LlmSettings
from svc_common.logs import get_logger

_log = get_logger("day0.memory")

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes a model takes: weights as they are held (of these, packed experts), caches, scratch of the operators,
    device slots of experts."""

    weight_bytes: int
    expert_bytes: int = 0
    cache_bytes: int = 0
    workspace_bytes: int = 0
    slot_bytes: int = 0


def check_memory(settings: LlmSettings, need: MemoryNeed) -> None:
    """Compares what is needed, the loading budget included, with what is available; raises LoadError with settings.

    On a CPU host and device memory are one: experts in host memory and their slots are both counted. On a GPU its own
    memory is what is compared; experts in host memory are not in it, and the loading budget is the host's.
    """
    later = need.cache_bytes + need.workspace_bytes + need.slot_bytes
    if settings.device == "cuda":
        on_host = need.expert_bytes if settings.experts_residency == "host" else 0
        needed = need.weight_bytes - on_host + later
        available = settings.max_memory_bytes or torch.cuda.mem_get_info()[0]
    else:
        # While weights are read their budget is held beside those already there; all else comes after it has gone.
        needed = need.weight_bytes + max(later, min(settings.load_budget_bytes, need.weight_bytes))
        available = settings.max_memory_bytes or available_bytes()
    if needed > available:
        workspace = slots = ""
        if need.workspace_bytes:
            workspace = (
                f", workspace {_gib(need.workspace_bytes)} "
                f"(experts_workspace_bytes {settings.experts_workspace_bytes}, "
                f"experts_convert_tokens {settings.experts_convert_tokens})"
            )
        if need.slot_bytes:
            slots = f", expert slots {_gib(need.slot_bytes)} (experts_device_slots {settings.experts_device_slots})"
        raise LoadError(
            f"memory: weights take {_gib(need.weight_bytes)} in {settings.dtype}, caches {_gib(need.cache_bytes)} "
            f"(cache_tokens {settings.cache_tokens}, max_running_sequences {settings.max_running_sequences}, "
            f"max_snapshots {settings.max_snapshots}){workspace}{slots}, {_gib(needed)} at the peak with "
            f"load_budget_bytes {settings.load_budget_bytes}; {_gib(available)} are available. Lower those, or use a "
            "smaller dtype"
        )
    _log.info("memory is enough", extra={**asdict(need), "available_bytes": available})


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
