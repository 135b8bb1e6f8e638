"""Builds a definition and fills it from a checkpoint; knows neither caches nor scheduling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from llm_svc.adopt.families import Family
from llm_svc.adopt.seams import EXPERTS_IMPLEMENTATION, adopted
from llm_svc.formats.mxfp4 import (
    FormatError,
    FoundExperts,
    PackedFormat,
    check_compressed_tensors_config,
    find_experts,
    read_experts,
)
from llm_svc.streamed import stream_tensors
from svc_common.checkpoint_errors import CheckpointError
from svc_common.checkpoint_source import CheckpointSource
from svc_common.store_errors import StoreError
from svc_common.weight_stream import Progress, WeightStream


class LoadError(Exception):
    """The checkpoint cannot be served; the message says what is wrong with which file or setting."""


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """What a checkpoint has for one service, known from its headers: no weight has been read yet."""

    stream: WeightStream
    packed: tuple[FoundExperts, ...]

    def resident_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the loaded weights: packed experts as they are, all else in `dtype`."""
        packed = {name for experts in self.packed for name in experts.names}
        return sum(
            span.size_bytes if name in packed else math.prod(span.shape) * dtype.itemsize
            for name, span in self.stream.spans.items()
        )


def find_native(source: CheckpointSource, config: PreTrainedConfig, family: Family) -> FoundWeights:
    """The weights of the native tier; what the family leaves to other services is not among them. Raises LoadError."""
    try:
        stream = source.weights(lambda name: not name.startswith(family.other_services))
        found = tuple(find_experts(stream.spans))
        _take_quantization(config, found)
    except (CheckpointError, StoreError, FormatError) as error:
        raise LoadError(f"{source.uri}: {error}") from error
    return FoundWeights(stream, found)


def find_upstream(source: CheckpointSource) -> FoundWeights:
    """The weights of the upstream tier: all there are. Raises LoadError."""
    try:
        stream = source.weights()
        if find_experts(stream.spans):
            raise LoadError("tier: upstream cannot run packed MXFP4 experts; use tier=native")
    except (CheckpointError, StoreError, FormatError) as error:
        raise LoadError(f"{source.uri}: {error}") from error
    return FoundWeights(stream, ())


def build_native(
    weights: FoundWeights, config: PreTrainedConfig, family: Family, dtype: torch.dtype, progress: Progress
) -> Any:
    """The family's model with our classes in it; routed experts that are packed stay packed. Raises LoadError."""
    try:
        tensors = stream_tensors(weights.stream, progress)
        packed = {name: tensors.pop(name) for experts in weights.packed for name in experts.names}
        classes = {**family.classes, **(family.packed_classes if weights.packed else {})}
        with adopted(classes, family.pretrained):
            model = _construct(
                family.model, config, tensors, dtype=dtype, experts_implementation=EXPERTS_IMPLEMENTATION
            )
        for experts in weights.packed:
            module = _packed_module(model, experts, family)
            module.fill(read_experts(experts, lambda name: packed[name][...]))
    except (OSError, ValueError, CheckpointError, StoreError, FormatError) as error:
        raise LoadError(str(error)) from error
    unfilled = [name for name, module in model.named_modules() if getattr(module, "packed", module) is None]
    if unfilled:
        raise LoadError(f"no packed experts for {', '.join(unfilled)}, though other layers have them")
    return model


def build_upstream(weights: FoundWeights, config: PreTrainedConfig, dtype: torch.dtype, progress: Progress) -> Any:
    """The model that upstream's auto classes would load, untouched. Raises LoadError."""
    try:
        return _construct(_upstream_class(config), config, stream_tensors(weights.stream, progress), dtype=dtype)
    except (OSError, ValueError, CheckpointError, StoreError) as error:
        raise LoadError(str(error)) from error


def _upstream_class(config: PreTrainedConfig) -> Any:
    """Classes for images come first."""
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise LoadError(f"model_type {config.model_type!r}: transformers has no class that generates text from it")


def _take_quantization(config: PreTrainedConfig, found: tuple[FoundExperts, ...]) -> None:
    """Checks what the config says of packed experts and takes it out, so that upstream reads plain weights only."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    if not found:
        raise LoadError(
            f"quantization_config: quant_method is {quantization.get('quant_method')!r}; of quantised checkpoints only "
            "those with packed MXFP4 experts are served"
        )
    if any(experts.format is PackedFormat.COMPRESSED_TENSORS for experts in found):
        check_compressed_tensors_config(quantization)
    del config.quantization_config


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
