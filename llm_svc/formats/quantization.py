"""Checks what a configuration says of its quantised weights against what is served; reads no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from day0_kernels.mxfp4 import GROUP_SIZE
from llm_svc.formats.format_error import FormatError
from llm_svc.formats.fp8 import BLOCK_SIDE
from llm_svc.formats.mxfp4 import FoundExperts, PackedFormat

SERVED = f"packed MXFP4 experts and FP8 weights in {BLOCK_SIDE}x{BLOCK_SIDE} blocks"
_BLOCK = [BLOCK_SIDE, BLOCK_SIDE]
# What Hugging Face's FP8 configuration may say, and what of it is served; None takes any value, because the dtypes of
# the tensors themselves decide it.
_FP8_FIELDS: Mapping[str, tuple[Any, ...] | None] = {
    "quant_method": ("fp8",),
    "weight_block_size": (_BLOCK,),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8", "fp4"),
    "modules_to_not_convert": None,
    "modules_to_convert": None,
    "ignored_layers": None,
    "dequantize": None,
}
_MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP_SIZE, "symmetric": True}
_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": _BLOCK, "symmetric": True}
_FP8_LAYOUT = "float-quantized"
# Each would change results beside the weights.
_COMPRESSED_TENSORS_EXTRAS = ("kv_cache_scheme", "sparsity_config", "transform_config")


def check_quantization(
    quantization: Mapping[str, Any] | None, packed: Iterable[FoundExperts], scaled: Mapping[str, str]
) -> None:
    """Refuses a `quantization_config` that the packed experts and FP8 weights found do not bear out.

    `scaled` is FP8 weights to their scales. FormatError names field, value and what is served.
    """
    formats = {experts.format for experts in packed}
    if quantization is None:
        if scaled:
            raise FormatError(f"quantization_config: absent, though {next(iter(scaled))} is FP8")
        return
    method = quantization.get("quant_method")
    if not formats and not scaled:
        raise FormatError(
            f"quantization_config: quant_method is {method!r}; of quantised checkpoints those with {SERVED} are served"
        )
    if method == "fp8":
        _check_fp8(quantization, bool(formats), bool(scaled))
    elif scaled and method != "compressed-tensors":
        raise FormatError(f"quantization_config.quant_method is {method!r}, FP8 weights need 'fp8'")
    if PackedFormat.COMPRESSED_TENSORS in formats or method == "compressed-tensors":
        check_compressed_tensors(quantization, fp8=bool(scaled))
    for weight, scale in scaled.items():
        if scale.endswith("_scale") != (method == "compressed-tensors"):
            raise FormatError(f"{scale}: scales of {weight} are not called so under quant_method {method!r}")


def _check_fp8(quantization: Mapping[str, Any], packed: bool, scaled: bool) -> None:
    for field, value in quantization.items():
        if field not in _FP8_FIELDS:
            raise FormatError(
                f"quantization_config.{field} is {value!r}; of this method only {', '.join(_FP8_FIELDS)} are known"
            )
        served = _FP8_FIELDS[field]
        if served is not None and (list(value) if isinstance(value, tuple) else value) not in served:
            raise FormatError(
                f"quantization_config.{field} is {value!r}, served is {' or '.join(repr(one) for one in served)}"
            )
    if scaled and "weight_block_size" not in quantization:
        raise FormatError(f"quantization_config.weight_block_size is absent, served is {_BLOCK}")
    stated = quantization.get("expert_dtype")
    if stated is not None and (stated == "fp4") != packed:
        raise FormatError(
            f"quantization_config.expert_dtype is {stated!r}, and the checkpoint has {'' if packed else 'no '}"
            "packed experts"
        )


def check_compressed_tensors(quantization: Mapping[str, Any], *, fp8: bool = False) -> None:
    """Refuses a compressed-tensors configuration with anything but MXFP4 groups, and where `fp8` FP8 blocks.

    Formats with packed uint8 codes of the same shapes but other scales or activations exist. FormatError names the key.
    """
    if quantization.get("quant_method") != "compressed-tensors":
        raise FormatError(f"quantization_config.quant_method is {quantization.get('quant_method')!r}")
    for key in _COMPRESSED_TENSORS_EXTRAS:
        if quantization.get(key):
            raise FormatError(f"quantization_config.{key} is {quantization[key]!r}, must be null: weights only")
    groups = quantization.get("config_groups") or {}
    if not groups:
        raise FormatError("quantization_config.config_groups is empty")
    for key, group in groups.items():
        _check_group(f"quantization_config.config_groups.{key}", group, quantization.get("format"), fp8)


def _check_group(where: str, group: Mapping[str, Any], default_layout: Any, fp8: bool) -> None:
    layout = group.get("format") or default_layout
    is_fp8 = fp8 and layout == _FP8_LAYOUT
    if not is_fp8 and layout != PackedFormat.COMPRESSED_TENSORS:
        other = f" or {_FP8_LAYOUT!r}" if fp8 else ""
        raise FormatError(f"{where}.format is {layout!r}, must be {PackedFormat.COMPRESSED_TENSORS.value!r}{other}")
    activations = group.get("input_activations")
    if activations is not None and not (is_fp8 and activations.get("dynamic") is True):
        raise FormatError(f"{where}.input_activations must be null{' or dynamic' if is_fp8 else ''}: weights only")
    if group.get("output_activations") is not None:
        raise FormatError(f"{where}.output_activations must be null: weights only")
    for field, value in (_FP8_WEIGHTS if is_fp8 else _MXFP4_WEIGHTS).items():
        got = (group.get("weights") or {}).get(field)
        if got != value:
            raise FormatError(f"{where}.weights.{field} is {got!r}, must be {value!r}")
