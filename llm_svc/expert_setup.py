"""Gets packed experts ready once they are loaded: where they live, the arena, and from how many tokens they convert."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from day0_kernels.registry import Resolved
from day0_kernels.workspace import Workspace
from llm_svc.adopt.operators import Operators
from llm_svc.adopt.packed_product import PackedProduct
from llm_svc.crossover import measure_crossover, run_both_once
from llm_svc.expert_memory import ExpertMemory
from llm_svc.expert_residency import ExpertCounts, ResidentExperts
from llm_svc.settings import LlmSettings
from svc_common.logs import get_logger

_log = get_logger("day0.experts")


@dataclass(frozen=True, slots=True)
class PreparedExperts:
    """The product on packed experts, and the arena of all operators: None where nothing needs scratch."""

    product: PackedProduct
    workspace: Workspace | None


def arena(
    device: torch.device, resolved: Iterable[Resolved], settings: LlmSettings, plan: ExpertMemory | None
) -> Workspace:
    """One arena for all layers: what the operators declare, and the FP8 scratch of the experts."""
    sizes = {"T": settings.max_batch_tokens, "B": settings.max_running_sequences}
    return Workspace(device, resolved, sizes, reserved=plan.reserved if plan else {})


def prepare_experts(
    model: nn.Module,
    plan: ExpertMemory | None,
    operators: Operators,
    resolved: tuple[Resolved, ...],
    settings: LlmSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> PreparedExperts:
    """Places the packed experts of every layer and chooses the way of their products; `plan` is None without any."""
    counts = ExpertCounts()
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if getattr(module, "resident", None) is not None
    }
    assert bool(layers) == (plan is not None)
    if plan is not None and plan.slots:
        for module in layers.values():
            module.keep_in_host_memory(plan.slots, device, counts)
    workspace = arena(device, resolved, settings, plan)
    convert_tokens = 0
    if plan is not None and settings.experts_convert_tokens:
        largest = max(layers.values(), key=lambda module: module.packed.gate_up.codes.nbytes).resident
        largest.find_lossless()
        product = PackedProduct(
            operators, workspace, ExpertCounts(), convert_tokens=0, experts_at_once=plan.experts_at_once
        )
        convert_tokens = settings.experts_convert_tokens
        if convert_tokens < 0:
            convert_tokens = _measured(product, largest, plan, settings, device, dtype)
        else:
            run_both_once(product, largest, plan, dtype=dtype, device=device)
        if convert_tokens:
            _find_lossless(layers)
        else:
            # Nothing will ever be converted: its scratch goes back before the service is ready.
            workspace = arena(device, resolved, settings, None)
    if plan is not None:
        _log.info(
            "experts placed",
            extra={
                "residency": settings.experts_residency,
                "slots": plan.slots,
                "slot_bytes": plan.slot_bytes,
                "convert_tokens": convert_tokens,
                "workspace_bytes": workspace.capacity_bytes,
                "experts_at_once": plan.experts_at_once,
            },
        )
    product = PackedProduct(
        operators,
        workspace,
        counts,
        convert_tokens=convert_tokens,
        experts_at_once=plan.experts_at_once if plan else 0,
    )
    return PreparedExperts(product, workspace if workspace.capacity_bytes else None)


def _measured(
    product: PackedProduct,
    resident: ResidentExperts,
    plan: ExpertMemory,
    settings: LlmSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    found = measure_crossover(product, resident, plan, max_tokens=settings.max_batch_tokens, dtype=dtype, device=device)
    _log.info(
        "experts: both ways measured",
        extra={"convert_tokens": found.convert_tokens, "timings": [asdict(timing) for timing in found.timings]},
    )
    return found.convert_tokens


def _find_lossless(layers: dict[str, Any]) -> None:
    """Every layer's; logs those with experts that stay in MXFP4."""
    for name, module in layers.items():
        kept = module.resident.find_lossless()
        if kept:
            _log.warning("experts stay in MXFP4: FP8 would have to round them", extra={"layer": name, "experts": kept})
