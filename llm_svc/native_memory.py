"""What the native tier takes under given settings: weights, caches, scratch, expert slots. Counts bytes, makes none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from day0_kernels.registry import Resolved
from llm_svc.adopt.families import Family
from llm_svc.build import LoadError
from llm_svc.cache.storage import LayerCache, layer_bytes
from llm_svc.expert_memory import ExpertMemory, plan_experts
from llm_svc.expert_setup import arena
from llm_svc.memory_check import MemoryNeed
from llm_svc.settings import LlmSettings


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of all weights as they are held, of the packed experts among them, and layers with such."""

    weight_bytes: int
    expert_bytes: int
    packed_layers: int


def layer_allocation(settings: LlmSettings, family: Family, text_config: Any) -> Callable[..., tuple[LayerCache, ...]]:
    """Makes the caches of every layer on the `device` it is called with."""
    return partial(
        family.allocate_layers,
        text_config,
        num_blocks=settings.cache_tokens // settings.block_size,
        block_size=settings.block_size,
        num_slots=settings.max_running_sequences,
        num_snapshots=settings.max_snapshots if settings.prefix_cache else 0,
        dtype=getattr(torch, settings.dtype),
    )


def native_need(
    settings: LlmSettings, family: Family, text_config: Any, resolved: Iterable[Resolved], weights: WeightSizes
) -> tuple[ExpertMemory | None, MemoryNeed]:
    """The plan of packed experts, None without any, and all bytes. LoadError and ValueError name a bad setting."""
    plan = None
    if weights.packed_layers:
        plan = plan_experts(settings, family.expert_shape(text_config), weights.packed_layers)
    else:
        refuse_host_residency(settings)
    nowhere = torch.device("meta")
    need = MemoryNeed(
        weight_bytes=weights.weight_bytes,
        expert_bytes=weights.expert_bytes,
        cache_bytes=layer_bytes(layer_allocation(settings, family, text_config)(device=nowhere)),
        workspace_bytes=arena(nowhere, resolved, settings, plan).capacity_bytes,
        slot_bytes=plan.slot_bytes if plan else 0,
    )
    return plan, need


def refuse_host_residency(settings: LlmSettings) -> None:
    """Raises LoadError where experts are to live on the host and none are packed."""
    if settings.experts_residency == "host":
        raise LoadError("experts_residency: host is for MXFP4 experts of the native tier, there are none; use device")
