"""Refuses rotary scalings that the definition would not know, before a weight is read; computes none itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def check_rope(config: PreTrainedConfig) -> None:
    """ValueError for a rope_type, under its old name or its new one, that transformers has no function for.

    Upstream reads `rope_scaling` and `type` as `rope_parameters` and `rope_type`, and a family's own configuration may
    rename its types; what is left here is what the definition will look up.
    """
    known = {"default", *ROPE_INIT_FUNCTIONS}
    for parameters in _all(getattr(config.get_text_config(), "rope_parameters", None)):
        if parameters["rope_type"] not in known:
            raise ValueError(
                f"rope_parameters.rope_type is {parameters['rope_type']!r}, must be one of {', '.join(sorted(known))}"
            )


def _all(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters, or where there are some for each type of layer, those of each."""
    if not isinstance(parameters, Mapping):
        return
    if parameters.get("rope_type") is not None:
        yield parameters
        return
    for inner in parameters.values():
        yield from _all(inner)
