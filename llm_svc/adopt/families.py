"""The families that have a native tier, and what binding one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import Glm5NextForConditionalGeneration, PreTrainedModel

from llm_svc.adopt import glm5_next
from llm_svc.adopt.experts import experts_forward
from llm_svc.adopt.packed_experts import Glm5NextPackedExperts, expert_shape
from llm_svc.adopt.seams import register_experts
from llm_svc.cache.storage import LayerCache
from llm_svc.expert_memory import ExpertShape


@dataclass(frozen=True, slots=True)
class Family:
    """One adopted definition.

    `model` is upstream's class for the whole model, `pretrained` the base that holds its output recorders, `classes`
    our subclasses by upstream's class names, `packed_classes` those that join them for packed experts. Tensors
    whose names start with one of `other_services` are not read here. `check` refuses configurations that the native
    tier cannot run, by name. `parts` gives the text model and the output head.
    `expert_shape` describes the routed experts of a layer, `allocate_layers` makes the caches.
    """

    model: type[PreTrainedModel]
    pretrained: type[PreTrainedModel]
    classes: Mapping[str, type[nn.Module]]
    packed_classes: Mapping[str, type[nn.Module]]
    other_services: tuple[str, ...]
    check: Callable[[Any, int], None]
    parts: Callable[[Any], tuple[nn.Module, nn.Module]]
    expert_shape: Callable[[Any], ExpertShape]
    allocate_layers: Callable[..., tuple[LayerCache, ...]]


register_experts(experts_forward)

FAMILIES: Mapping[str, Family] = {
    "glm5_next": Family(
        model=Glm5NextForConditionalGeneration,
        pretrained=glm5_next.upstream.Glm5NextPreTrainedModel,
        classes=glm5_next.ADOPTED,
        packed_classes={"Glm5NextTextExperts": Glm5NextPackedExperts},
        other_services=("model.visual.",),
        check=glm5_next.check_config,
        parts=glm5_next.split_model,
        expert_shape=expert_shape,
        allocate_layers=glm5_next.allocate_layers,
    )
}
