"""Random weights made on the device from a config alone: full shapes to measure without a checkpoint, not to serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from llm_svc.adopt.families import Family
from llm_svc.adopt.seams import EXPERTS_IMPLEMENTATION, adopted
from llm_svc.expert_memory import ExpertShape
from llm_svc.formats.mxfp4 import PackedExperts, PackedWeight
from llm_svc.native_memory import WeightSizes

SEED = 0
GROUP = 32
# Scale bytes of 2^-8 to 2^-5: sums stay small, and one block of FP8 holds them exactly.
_FIRST_SCALE, _LAST_SCALE = 119, 122


def build_dummy(
    config: PreTrainedConfig,
    family: Family,
    dtype: torch.dtype,
    *,
    device: torch.device,
    experts_device: torch.device,
) -> nn.Module:
    """The family's model as upstream initialises it, with random MXFP4 experts; the same for the same device type."""
    torch.manual_seed(SEED)
    with adopted({**family.classes, **family.packed_classes}, family.pretrained), device:
        model: nn.Module = family.model._from_config(config, dtype=dtype, experts_implementation=EXPERTS_IMPLEMENTATION)
    keep_float32(model)
    shape = family.expert_shape(config.get_text_config())
    for module in _packed_modules(model, family):
        module.fill(random_experts(shape, experts_device))
    return model.eval().requires_grad_(False)


def dummy_sizes(config: PreTrainedConfig, family: Family, dtype: torch.dtype) -> WeightSizes:
    """Of all weights that `build_dummy` would make; makes none."""
    nowhere = torch.device("meta")
    model = build_dummy(config, family, dtype, device=nowhere, experts_device=nowhere)
    packed: list[PackedExperts] = [module.packed for module in _packed_modules(model, family)]
    expert_bytes = sum(
        weight.codes.nbytes + weight.scales.nbytes for experts in packed for weight in (experts.gate_up, experts.down)
    )
    return WeightSizes(expert_bytes + sum(tensor.nbytes for tensor in model.parameters()), expert_bytes, len(packed))


def random_experts(shape: ExpertShape, device: torch.device) -> PackedExperts:
    """One layer's experts: any code, scales from 2^-8 to 2^-5."""

    def weight(outputs: int, depth: int) -> PackedWeight:
        codes = torch.empty(shape.experts, outputs, depth // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(shape.experts, outputs, depth // GROUP, dtype=torch.uint8, device=device)
        return PackedWeight(codes.random_(0, 256), scales.random_(_FIRST_SCALE, _LAST_SCALE + 1))

    return PackedExperts(weight(2 * shape.intermediate, shape.hidden), weight(shape.hidden, shape.intermediate))


def _packed_modules(model: nn.Module, family: Family) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, tuple(family.packed_classes.values()))]


def keep_float32(model: nn.Module) -> None:
    """What upstream's loading leaves in float32 whatever the dtype; making a model from a config does not."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float()
