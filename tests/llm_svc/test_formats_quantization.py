"""What a quantization_config may say: everything else is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

from day0.quantize import quantization_config
from llm_svc.formats.format_error import FormatError
from llm_svc.formats.mxfp4 import FoundExperts, PackedFormat
from llm_svc.formats.quantization import check_compressed_tensors, check_quantization


def _config(**changes: Any) -> dict[str, Any]:
    config = quantization_config()
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def test_our_own_quantization_config_is_accepted() -> None:
    check_compressed_tensors(_config())


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_bits", 8), ("type", "int"), ("strategy", "channel"), ("group_size", 16), ("symmetric", False)],
)
def test_another_scheme_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(FormatError, match=rf"group_0.weights.{field} is {value!r}, must be"):
        check_compressed_tensors(_config(**{field: value}))


def test_other_quantisations_are_refused() -> None:
    for change, message in (
        ({"quant_method": "fp8"}, "quant_method is 'fp8'"),
        ({"config_groups": {}}, "config_groups is empty"),
    ):
        with pytest.raises(FormatError, match=message):
            check_compressed_tensors(_config() | change)
    config = _config()
    config["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    with pytest.raises(FormatError, match=r"group_0\.format is 'nvfp4-pack-quantized', must be 'mxfp4-pack-quantized'"):
        check_compressed_tensors(config)
    config = _config()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(FormatError, match=r"group_0\.input_activations must be null"):
        check_compressed_tensors(config)


FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "modules_to_not_convert": ["lm_head"],
}
BLOCKS = {
    "format": "float-quantized",
    "targets": ["Linear"],
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    "output_activations": None,
    "weights": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
        "symmetric": True,
        "dynamic": False,
    },
}
DEEPSEEK = FoundExperts("layers.0.experts", PackedFormat.DEEPSEEK, 2, ("w1", "w3", "w2"))
COMPRESSED = FoundExperts("layers.0.experts", PackedFormat.COMPRESSED_TENSORS, 2, ("w1", "w3", "w2"))
HF_PAIR = {"a.weight": "a.weight_scale_inv"}


def test_what_is_served() -> None:
    check_quantization(None, [], {})
    check_quantization(FP8, [], HF_PAIR)
    check_quantization(FP8 | {"weight_block_size": (128, 128)}, [], HF_PAIR)
    check_quantization(FP8 | {"expert_dtype": "fp4"}, [DEEPSEEK], {"a.weight": "a.scale"})
    both = quantization_config()
    both["config_groups"]["group_1"] = BLOCKS
    check_quantization(both, [COMPRESSED], {"a.weight": "a.weight_scale"})


@pytest.mark.parametrize(
    ("field", "value", "served"),
    [
        ("weight_block_size", [64, 128], r"\[128, 128\]"),
        ("weight_block_size", None, r"\[128, 128\]"),
        ("activation_scheme", "static", "'dynamic'"),
        ("fmt", "e5m2", "'e4m3'"),
        ("scale_fmt", "ue4m3", "'float' or 'ue8m0'"),
        ("expert_dtype", "int4", "'fp8' or 'fp4'"),
    ],
)
def test_another_fp8_scheme_is_refused_by_its_field(field: str, value: Any, served: str) -> None:
    with pytest.raises(FormatError, match=rf"quantization_config.{field} is .*, served is {served}") as caught:
        check_quantization(FP8 | {field: value}, [], HF_PAIR)
    assert repr(value) in str(caught.value)


def test_an_unknown_fp8_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"quantization_config\.rotate is 'hadamard'; .* only quant_method, weight_"):
        check_quantization(FP8 | {"rotate": "hadamard"}, [], HF_PAIR)


def test_the_block_size_must_be_there() -> None:
    without = {field: value for field, value in FP8.items() if field != "weight_block_size"}
    with pytest.raises(FormatError, match=r"weight_block_size is absent, served is \[128, 128\]"):
        check_quantization(without, [], HF_PAIR)
    check_quantization(without, [DEEPSEEK], {})


@pytest.mark.parametrize(
    ("quantization", "packed", "scaled", "message"),
    [
        (None, [], HF_PAIR, "quantization_config: absent, though a.weight is FP8"),
        (FP8, [], {}, "quant_method is 'fp8'; of quantised checkpoints those with packed MXFP4 experts and FP8"),
        ({"quant_method": "awq"}, [], HF_PAIR, "quant_method is 'awq', FP8 weights need 'fp8'"),
        (FP8 | {"expert_dtype": "fp4"}, [], HF_PAIR, "expert_dtype is 'fp4', and the checkpoint has no packed"),
        (FP8 | {"expert_dtype": "fp8"}, [DEEPSEEK], HF_PAIR, "expert_dtype is 'fp8', and the checkpoint has packed"),
        (FP8, [], {"a.weight": "a.weight_scale"}, "a.weight_scale: scales of a.weight are not called so under .*'fp8'"),
        (FP8, [COMPRESSED], HF_PAIR, "quant_method is 'fp8'"),
    ],
)
def test_a_config_that_the_tensors_do_not_bear_out(
    quantization: dict[str, Any] | None, packed: list[FoundExperts], scaled: dict[str, str], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        check_quantization(quantization, packed, scaled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": BLOCKS["weights"] | {"strategy": "channel"}}, "weights.strategy is 'channel', must be 'block'"),
        ({"weights": BLOCKS["weights"] | {"block_structure": [1, 128]}}, r"block_structure is \[1, 128\], must be"),
        ({"input_activations": {"dynamic": False}}, "input_activations must be null or dynamic"),
        ({"output_activations": {"dynamic": True}}, "output_activations must be null"),
        ({"format": "int-quantized"}, "must be 'mxfp4-pack-quantized' or 'float-quantized'"),
    ],
)
def test_another_block_scheme_is_refused_by_its_field(change: dict[str, Any], message: str) -> None:
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": BLOCKS | change}}
    with pytest.raises(FormatError, match=rf"group_0\.{message}|group_0.*{message}"):
        check_quantization(quantization, [], {"a.weight": "a.weight_scale"})


@pytest.mark.parametrize("key", ["kv_cache_scheme", "sparsity_config", "transform_config"])
def test_what_changes_more_than_weights_is_refused(key: str) -> None:
    with pytest.raises(FormatError, match=rf"quantization_config\.{key} is .*must be null"):
        check_compressed_tensors(quantization_config() | {key: {"num_bits": 8}})
