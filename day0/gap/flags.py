"""Finds settings of the language service that cannot work with a model on a device, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from day0.gap.device import Device
from day0.inventory.source import InventoryError
from llm_svc.adopt.families import FAMILIES
from llm_svc.expert_memory import plan_experts
from llm_svc.settings import LlmSettings
from svc_common.settings import SettingsError, read_settings


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """A setting, and why the service would refuse it; `given` where the user asked for it."""

    flag: str
    reason: str
    given: bool


def read_flags(model: str, device: Device, dtype: str, given: Sequence[str]) -> LlmSettings:
    """The settings that `--set FIELD=VALUE` asks for. InventoryError for one that is unknown or out of its bounds."""
    environ = {"DAY0_LLM_MODEL": model, "DAY0_LLM_DEVICE": device.type, "DAY0_LLM_DTYPE": dtype}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InventoryError(f"--set: wants FIELD=VALUE, got {item!r}")
        environ[f"DAY0_LLM_{key.removeprefix('llm.').upper()}"] = value
    try:
        return read_settings(LlmSettings, environ)
    except SettingsError as error:
        raise InventoryError(f"--set: {error}") from None


def refused_flags(model_type: str, text_config: Any, settings: LlmSettings) -> list[RefusedFlag]:
    """What the service would refuse: first of the settings given, then of others that come to mind."""
    family = FAMILIES.get(model_type)
    refused: list[RefusedFlag] = []

    def refuse(flag: str, reason: str, given: bool) -> None:
        refused.append(RefusedFlag(flag, reason, given))

    if family is None:
        known = ", ".join(sorted(FAMILIES))
        refuse("tier=native", f"native knows {known}, and the model is {model_type}", settings.tier == "native")
        refuse("load_format=dummy", "it is for the native tier", settings.load_format == "dummy")
        reason = "it is for MXFP4 experts of the native tier"
        refuse("experts_residency=host", reason, settings.experts_residency == "host")
        refuse("a checkpoint with experts in MXFP4", "the upstream tier runs plain weights only", False)
        return sorted(refused, key=lambda flag: not flag.given)
    refuse(
        "tier=upstream with experts in MXFP4", "the upstream tier runs plain weights only", settings.tier == "upstream"
    )
    for size in dict.fromkeys((settings.block_size, 1, 16, 48, 64, 256)):
        try:
            family.check(text_config, size)
        except ValueError as error:
            refuse(f"block_size={size}", str(error), size == settings.block_size)
    shape = family.expert_shape(text_config)
    few = {"experts_residency": "host", "experts_device_slots": max(1, shape.top_k - 1)}
    small = {"experts_residency": "device", "experts_workspace_bytes": 1, "experts_convert_tokens": -1}
    for flag, update in (
        ("", {}),
        (f"experts_device_slots={few['experts_device_slots']} with experts_residency=host", few),
        (f"experts_workspace_bytes below {shape.largest_matrix_bytes}", small),
    ):
        try:
            plan_experts(settings.model_copy(update=update), shape, 1)
        except ValueError as error:
            refuse(flag or "the settings given", str(error), not update)
    return sorted(refused, key=lambda flag: not flag.given)
