"""Puts the gap together: parts, memory, flags, and the ordered list of work that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from day0.gap.device import Device
from day0.gap.flags import RefusedFlag, read_flags, refused_flags
from day0.gap.memory import WeightPlan, plan_memory
from day0.gap.parts import REFERENCE, Part, Status, find_parts
from day0.inventory.definition import build
from day0.inventory.inventory import Inventory, take_inventory
from day0.inventory.source import ModelSource

COMMUNITY, LIBRARY, NEW_OPERATOR = "community", "library", "new operator"
_COSTS = (COMMUNITY, LIBRARY, NEW_OPERATOR)


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to do: at what `cost`, for which part, and how."""

    cost: str
    part: str
    what: str


@dataclass(frozen=True, slots=True)
class Gap:
    """What stands between a definition and production on a device."""

    inventory: Inventory
    device: Device
    parts: tuple[Part, ...]
    memory: tuple[WeightPlan, ...]
    flags: tuple[RefusedFlag, ...]
    work: tuple[Work, ...]

    @property
    def missing(self) -> list[str]:
        """Parts that nothing of ours computes, and settings given that cannot work."""
        parts = [f"{part.name} ({part.kind.name})" for part in self.parts if part.status is Status.MISSING]
        return [*parts, *(flag.flag for flag in self.flags if flag.given)]


def find_gap(source: ModelSource, device: Device, dtype: str, settings: Sequence[str] = ()) -> Gap:
    """Raises InventoryError for a configuration that makes no model and a setting that does not exist."""
    flags = read_flags(source.name, device, dtype, settings)
    wanted = getattr(torch, flags.dtype)
    model = build(source.config, wanted)
    inventory = take_inventory(source, wanted, block_size=flags.block_size, model=model)
    parts = find_parts(model, inventory, source.config, device, wanted)
    return Gap(
        inventory,
        device,
        tuple(parts),
        tuple(plan_memory(model, inventory, source.config, device, flags)),
        tuple(refused_flags(inventory.model_type, source.config.get_text_config(), flags)),
        tuple(order_work(parts)),
    )


def order_work(parts: Sequence[Part]) -> list[Work]:
    """The cheapest first, and of one cost the part with the most FLOPs of a decode step first.

    The community's own code comes first: what no operator of ours is bound to runs as upstream wrote it.
    """
    unbound = sum(not part.bound for part in parts)
    work = [(found, part.flops or 0) for part in parts if (found := _work(part)) is not None]
    ordered = [found for found, flops in sorted(work, key=lambda item: (_COSTS.index(item[0].cost), -item[1]))]
    if unbound:
        what = f"serve it in the upstream tier as it is: {unbound} kinds of part run as upstream wrote them"
        ordered.insert(0, Work(COMMUNITY, "the whole definition", what))
    return ordered


def _work(part: Part) -> Work | None:
    if part.status is Status.NATIVE:
        return None
    refused = [answer.operator for answer in part.operators if answer.chosen is None]
    slow = [answer.operator for answer in part.operators if answer.chosen == REFERENCE]
    if refused or (part.bound and slow):
        offered = f"; {part.kind.package} has one" if part.kind.package else ""
        names = ", ".join(refused or slow)
        cost = LIBRARY if part.kind.package else NEW_OPERATOR
        return Work(cost, part.name, f"a backend for {names} at this model's sizes on this device{offered}")
    if part.operators:
        names = ", ".join(answer.operator for answer in part.operators)
        also = f"; {part.kind.lacking}" if part.kind.lacking else ""
        what = f"bind {names} through {part.seam}, where their formulas are this part's{also}"
        return Work(LIBRARY, part.name, what)
    if part.kind.package:
        return Work(LIBRARY, part.name, f"{part.kind.lacking}; bind {part.kind.package} through {part.seam}")
    return Work(NEW_OPERATOR, part.name, f"{part.kind.lacking}: spec, reference and backend, through {part.seam}")
