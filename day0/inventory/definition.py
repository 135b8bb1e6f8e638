"""Builds upstream's definition on the meta device, where it has shapes and no bytes; runs nothing."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from day0.inventory.source import InventoryError

ATTENTION_INTERFACE = "attention interface"
EXPERTS_FUNCTION = "experts function"
PATCH_MAPPING = "patch mapping"
NO_SEAM = "none"


def build(config: Any, dtype: torch.dtype) -> Any:
    """The model that upstream's auto classes make of `config`, in `dtype`; InventoryError where they make none.

    What a loaded checkpoint keeps in float32 whatever its dtype is in float32 here too.
    """
    from transformers.initialization import no_init_weights

    from llm_svc.dummy import keep_float32

    cls = _class_of(config)
    try:
        with torch.device("meta"), no_init_weights():
            model = cls._from_config(config, dtype=dtype)
            # A part of initialisation, which is left out here.
            model.tie_weights()
    except Exception as error:  # upstream's constructors raise whatever a missing field leads to
        raise InventoryError(
            f"{config.model_type}: {cls.__name__} cannot be built from this configuration: "
            f"{type(error).__name__}: {error}"
        ) from error
    keep_float32(model)
    return model.eval().requires_grad_(False)


def _class_of(config: Any) -> Any:
    """Classes that generate text come first, and of these the ones for images."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise InventoryError(f"{config.model_type}: transformers has a configuration of it and no model")


def seam_of(cls: type[nn.Module]) -> str:
    """Through what a class of a definition can be given other arithmetic without touching it.

    Every class of a definition can be replaced by patch mapping; the two interfaces are named where its forward asks
    them. torch's own classes are reached by none: they are bound module by module after construction.
    """
    code = inspect.unwrap(cls.forward).__code__
    if takes_experts_function(cls):
        return EXPERTS_FUNCTION
    if "ALL_ATTENTION_FUNCTIONS" in code.co_names:
        return ATTENTION_INTERFACE
    return PATCH_MAPPING if cls.__module__.startswith("transformers.") else NO_SEAM


def takes_experts_function(cls: type[nn.Module]) -> bool:
    """Whether upstream's decorator lets the forward of this class be chosen by name."""
    code = getattr(cls.forward, "__code__", None)
    return code is not None and "experts_interface" in code.co_freevars
