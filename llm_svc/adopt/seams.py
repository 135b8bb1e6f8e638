"""The only place that registers anything with transformers; what it registers lasts for one construction."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

EXPERTS_IMPLEMENTATION = "day0"

ExpertsFunction = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_construction = Lock()


@contextmanager
def adopted(classes: Mapping[str, type[nn.Module]], pretrained: type[PreTrainedModel]) -> Iterator[None]:
    """While open, models of the family are built with `classes` in place of upstream's of those names.

    `pretrained` is the family's base class. Upstream rewrites the output recorders of that class for good when it
    patches a model, which would leave later, unadopted models of the same process without recorded outputs: they are
    put back here. Two constructions never overlap.
    """
    with _construction:
        recorders = copy.deepcopy(pretrained._can_record_outputs)
        originals = [
            (module, name, vars(module)[name])
            for module in list(sys.modules.values())
            if getattr(module, "__name__", "").startswith("transformers.models.")
            for name in classes
            if name in vars(module)
        ]
        # Upstream searches for a name as a pattern: unanchored it would also replace classes whose names go on.
        patterns = {f"^{name}$": replacement for name, replacement in classes.items()}
        register_patch_mapping(patterns)
        try:
            yield
        finally:
            unregister_patch_mapping(list(patterns))
            pretrained._can_record_outputs = recorders
            # After a construction that raised upstream leaves our classes in place of its own.
            for module, name, original in originals:
                setattr(module, name, original)


def register_experts(function: ExpertsFunction) -> None:
    """Makes `function` selectable as `experts_implementation="day0"`.

    It gets (module, hidden [T, hidden], top_k_index [T, top_k], top_k_weights [T, top_k]) and returns [T, hidden].
    """
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, function)
