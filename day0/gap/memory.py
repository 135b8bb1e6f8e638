"""Plans the memory of a device: weights by format, caches, scratch, and the largest context and batch that fit.

Every count is one the language service itself makes; nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from day0.gap.device import Device
from day0.inventory.inventory import Inventory
from day0_kernels.described_device import described
from day0_kernels.registry import BackendRefused
from llm_svc.adopt.families import FAMILIES, Family
from llm_svc.adopt.operators import resolve_operators
from llm_svc.build import LoadError
from llm_svc.dummy import dummy_sizes
from llm_svc.memory_check import MemoryNeed, check_memory
from llm_svc.native_memory import WeightSizes, native_need
from llm_svc.settings import LlmSettings

WIDENED = "widened when loaded"
CONTEXTS = (8192, 32768, 131072, 1048576)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Weights in one format, and what fits beside them on the device.

    `held_bytes` are those of the loaded model. `service` is what the service takes with the settings given and
    `refusal` its own reason not to start. `context_tokens` is the longest sequence that fits alone, None where not even
    the weights do; `batches` gives for each context how many such sequences fit together.
    """

    format: str
    tier: str
    held_bytes: int
    workspace_bytes: int
    service: MemoryNeed | None
    refusal: str | None
    context_tokens: int | None
    batches: Mapping[int, int]
    note: str = ""


def plan_memory(
    model: nn.Module, inventory: Inventory, config: Any, device: Device, settings: LlmSettings
) -> list[WeightPlan]:
    """One plan for each format the service can hold: the model's dtype, FP8 read into it, experts in MXFP4."""
    dtype = getattr(torch, settings.dtype)
    family = FAMILIES.get(inventory.model_type)
    limit = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    elsewhere = family.other_services if family else ()
    held = sum(p.nbytes for name, p in model.named_parameters() if not (elsewhere and name.startswith(elsewhere)))
    settings = settings.model_copy(update={"max_memory_bytes": settings.max_memory_bytes or device.memory_bytes})
    if family is None:
        plan = _upstream(inventory, held, limit, settings)
        return [plan, replace(plan, format=f"fp8 checkpoint, held in {settings.dtype}", note=WIDENED)]
    packed = dummy_sizes(config, family, dtype)
    plans = [
        _native(inventory, family, config, device, settings, WeightSizes(held, 0, 0), limit, settings.dtype),
        _native(inventory, family, config, device, settings, packed, limit, "experts in mxfp4"),
    ]
    fp8 = replace(plans[0], format=f"fp8 checkpoint, held in {settings.dtype}", note=WIDENED)
    plans.insert(1, fp8)
    if device.type == "cuda" and settings.experts_residency == "device":
        on_host = settings.model_copy(update={"experts_residency": "host"})
        name = "experts in mxfp4, experts_residency=host"
        plans.append(_native(inventory, family, config, device, on_host, packed, limit, name))
    return plans


def _native(
    inventory: Inventory,
    family: Family,
    config: Any,
    device: Device,
    settings: LlmSettings,
    weights: WeightSizes,
    limit: int,
    name: str,
) -> WeightPlan:
    need, refusal = None, None
    try:
        with described(device.capability):
            _, resolved = resolve_operators(torch.device(device.type), getattr(torch, settings.dtype))
        _, need = native_need(settings, family, config.get_text_config(), resolved, weights)
        check_memory(settings, need)
    except (BackendRefused, LoadError, ValueError) as error:
        refusal = str(error)
    workspace = need.workspace_bytes + need.slot_bytes if need else 0
    on_host = weights.expert_bytes if settings.experts_residency == "host" and device.type == "cuda" else 0
    assert inventory.native is not None
    free = settings.max_memory_bytes - weights.weight_bytes + on_host - workspace
    context, batches = _fitting(free, inventory.native.token_bytes, inventory.native.sequence_bytes, limit)
    return WeightPlan(name, "native", weights.weight_bytes, workspace, need, refusal, context, batches)


def _upstream(inventory: Inventory, held: int, limit: int, settings: LlmSettings) -> WeightPlan:
    """One sequence at a time, in the definition's own caches."""
    need, refusal = MemoryNeed(held), None
    try:
        check_memory(settings, need)
    except LoadError as error:
        refusal = str(error)
    growing = sum(row.token_bytes for row in inventory.caches if row.bound_tokens is None)
    fixed = sum(row.sequence_bytes + row.token_bytes * (row.bound_tokens or 0) for row in inventory.caches)
    if not inventory.caches:
        return WeightPlan(settings.dtype, "upstream", held, 0, need, refusal, None, {}, "caches were not traced")
    context, _ = _fitting(settings.max_memory_bytes - held, growing, fixed, limit)
    batches = {tokens: 1 for tokens in CONTEXTS if context is not None and tokens <= context}
    note = "one sequence at a time; activations come on top"
    return WeightPlan(settings.dtype, "upstream", held, 0, need, refusal, context, batches, note)


def _fitting(free: float, token_bytes: float, sequence_bytes: float, limit: int) -> tuple[int | None, dict[int, int]]:
    """The longest context of one sequence within the model's own limit, and sequences by context."""
    if free <= sequence_bytes:
        return None, {}
    longest = int((free - sequence_bytes) // token_bytes) if token_bytes else limit
    longest = min(longest, limit) if limit else longest
    wanted = sorted({tokens for tokens in CONTEXTS if tokens <= longest} | {longest})
    return longest, {tokens: int(free // (sequence_bytes + tokens * token_bytes)) for tokens in wanted}
