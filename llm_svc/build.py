"""Builds a definition and fills it from a checkpoint; knows neither caches nor scheduling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from llm_svc.adopt.families import Family
from llm_svc.adopt.seams import EXPERTS_IMPLEMENTATION, adopted
from llm_svc.formats.format_error import FormatError
from llm_svc.formats.fp8 import find_scaled, refuse_stray_scales
from llm_svc.formats.mxfp4 import FoundExperts, find_experts, read_experts
from llm_svc.formats.quantization import check_quantization
from llm_svc.rope_check import check_rope
from llm_svc.streamed import stream_tensors
from svc_common.checkpoint_errors import CheckpointError
from svc_common.checkpoint_source import CheckpointSource
from svc_common.store_errors import StoreError
from svc_common.weight_stream import Progress, WeightStream


class LoadError(Exception):
    """The checkpoint cannot be served; the message says what is wrong with which file or setting."""


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """What a checkpoint has for one service, known from its headers: no weight has been read yet.

    `scaled` is FP8 weights to their scales. Both tiers widen them to their own dtype; a backend that keeps FP8 takes
    such pairs out before `stream_tensors` does that, the way `build_native` keeps packed experts.
    """

    stream: WeightStream
    packed: tuple[FoundExperts, ...]
    scaled: Mapping[str, str]

    def packed_bytes(self) -> int:
        """Bytes of the packed experts, scales included."""
        return sum(self.stream.spans[name].size_bytes for experts in self.packed for name in experts.names)

    def resident_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the loaded weights: packed experts as they are, all else in `dtype`, scales of FP8 weights gone."""
        packed = {name for experts in self.packed for name in experts.names}
        scales = set(self.scaled.values())
        return sum(
            span.size_bytes if name in packed else math.prod(span.shape) * dtype.itemsize
            for name, span in self.stream.spans.items()
            if name not in scales
        )


def find_native(source: CheckpointSource, config: PreTrainedConfig, family: Family) -> FoundWeights:
    """The weights of the native tier; what the family leaves to other services is not among them. Raises LoadError."""
    return _find(source, config, lambda name: not name.startswith(family.other_services))


def find_upstream(source: CheckpointSource, config: PreTrainedConfig) -> FoundWeights:
    """The weights of the upstream tier: all there are. Raises LoadError."""
    found = _find(source, config, lambda _: True)
    if found.packed:
        raise LoadError("tier: upstream cannot run packed MXFP4 experts; use tier=native")
    return found


def _find(source: CheckpointSource, config: PreTrainedConfig, select: Callable[[str], bool]) -> FoundWeights:
    """Checks what the config says of quantised weights and takes it out, so that upstream sees plain weights only."""
    try:
        check_rope(config)
        stream = source.weights(select)
        scaled = find_scaled(stream.spans)
        # DeepSeek's FP8 experts are called as its packed ones are.
        packed = tuple(find_experts(stream.spans.keys() - scaled.keys() - set(scaled.values())))
        known = {*scaled, *scaled.values(), *(name for experts in packed for name in experts.names)}
        refuse_stray_scales(stream.spans, known)
        check_quantization(_take_quantization(config), packed, scaled)
    except (ValueError, CheckpointError, StoreError, FormatError) as error:
        raise LoadError(f"{source.uri}: {error}") from error
    return FoundWeights(stream, packed, scaled)


def _take_quantization(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """What the config, or that of its text model, says of quantised weights; it says nothing of them afterwards."""
    for part in (config, config.get_text_config()):
        quantization: Mapping[str, Any] | None = getattr(part, "quantization_config", None)
        if quantization is not None:
            del part.quantization_config
            return quantization
    return None


def build_native(
    weights: FoundWeights,
    config: PreTrainedConfig,
    family: Family,
    dtype: torch.dtype,
    progress: Progress,
    *,
    device: torch.device,
    experts_device: torch.device,
) -> Any:
    """The family's model on `device` with our classes in it. Raises LoadError.

    Routed experts that are packed stay packed, and go to `experts_device` as they arrive.
    """
    try:
        names = {name for experts in weights.packed for name in experts.names}
        tensors = stream_tensors(weights.stream, progress, weights.scaled, dtype, device=experts_device, placed=names)
        packed = {name: tensors.pop(name) for experts in weights.packed for name in experts.names}
        classes = {**family.classes, **(family.packed_classes if weights.packed else {})}
        with adopted(classes, family.pretrained):
            model = _construct(
                family.model, config, tensors, dtype=dtype, experts_implementation=EXPERTS_IMPLEMENTATION
            )
        for experts in weights.packed:
            module = _packed_module(model, experts, family)
            module.fill(read_experts(experts, lambda name: packed[name][...]))
        # Packed experts are no parameters and stay where they are.
        model = model.to(device)
    except (OSError, ValueError, CheckpointError, StoreError, FormatError) as error:
        raise LoadError(str(error)) from error
    unfilled = [name for name, module in model.named_modules() if getattr(module, "packed", module) is None]
    if unfilled:
        raise LoadError(f"no packed experts for {', '.join(unfilled)}, though other layers have them")
    return model


def build_upstream(weights: FoundWeights, config: PreTrainedConfig, dtype: torch.dtype, progress: Progress) -> Any:
    """The model that upstream's auto classes would load, untouched. Raises LoadError."""
    try:
        tensors = stream_tensors(weights.stream, progress, weights.scaled, dtype)
        return _construct(_upstream_class(config), config, tensors, dtype=dtype)
    except (OSError, ValueError, CheckpointError, StoreError, FormatError) as error:
        raise LoadError(str(error)) from error


def _upstream_class(config: PreTrainedConfig) -> Any:
    """Classes for images come first."""
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise LoadError(f"model_type {config.model_type!r}: transformers has no class that generates text from it")


def _packed_module(model: Any, experts: FoundExperts, family: Family) -> Any:
    try:
        module = model.get_submodule(experts.prefix)
    except AttributeError:
        module = None
    if not isinstance(module, tuple(family.packed_classes.values())):
        raise LoadError(f"{experts.prefix}: packed experts, and the model has none of that name")
    return module


def _construct(cls: Any, config: PreTrainedConfig, tensors: dict[str, Any], **options: Any) -> Any:
    """Upstream's own loading, refusing what it would only warn of: weights that are missing, left over or misshapen."""
    model, info = cls.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        output_loading_info=True,
        # Reported below by name; upstream's own error points to a printed table.
        ignore_mismatched_sizes=True,
        **options,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in info.get(kind) or ())
        if names:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise LoadError(f"{kind.replace('_', ' ')}: {shown}")
    return model.eval().requires_grad_(False)
