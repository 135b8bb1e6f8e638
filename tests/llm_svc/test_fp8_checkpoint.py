"""FP8 checkpoints as they are published: the weights and tokens of the same values, decoded beforehand, in upstream."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Glm5NextForConditionalGeneration

from day0_kernels.comparison import same_bits
from day0_kernels.mxfp4 import decode, encode
from llm_svc import streamed
from llm_svc.adopt.families import FAMILIES
from llm_svc.build import LoadError, find_native
from llm_svc.settings import LlmSettings
from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_source import CheckpointSource
from tests.llm_svc.checkpoints import load
from tests.llm_svc.conftest import Sample, Upstream
from tests.llm_svc.fp8 import decode_blocks, encode_blocks
from tests.llm_svc.packed import Tensors, read, write
from tests.llm_svc.test_memory_check import never
from tests.llm_svc.test_parity import request_of, wrong
from tests.loopback import LlmOnLoopback

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
DENSE = re.compile(r"model\.language_model\..+_proj\.weight|lm_head\.weight")
DEEPSEEK_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": BLOCKS, "input_activations": {"dynamic": True}}},
}
NORM = "model.language_model.norm.weight"


def dense_names(tensors: Tensors) -> list[str]:
    names = [name for name, tensor in tensors.items() if DENSE.fullmatch(name) and tensor.dim() == 2]
    assert {"lm_head.weight"} < set(names) and any(EXPERT.fullmatch(name) for name in names)
    return names


def huggingface(tensors: Tensors, decoded: Tensors) -> dict[str, Any]:
    """Every projection, each expert by itself."""
    for name in dense_names(tensors):
        tensors[name], tensors[f"{name}_scale_inv"] = encode_blocks(tensors[name])
        decoded[name] = decode_blocks(tensors[name], tensors[f"{name}_scale_inv"])
    return FP8 | {"modules_to_not_convert": ["model.visual"]}


def stacked(tensors: Tensors, decoded: Tensors) -> dict[str, Any]:
    """The experts of a layer in two tensors, as upstream's own modules have them."""
    for prefix in sorted({match[1] for name in tensors if (match := EXPERT.fullmatch(name))}):
        count = sum(1 for name in tensors if name.startswith(f"{prefix}.") and name.endswith("down_proj.weight"))
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{projection}.weight") for expert in range(count)])
            for projection in ("gate_proj", "up_proj", "down_proj")
        )
        for name, tensor in (("gate_up_proj", torch.cat((gate, up), 1)), ("down_proj", down)):
            codes, scales = encode_blocks(tensor)
            tensors[f"{prefix}.{name}"], tensors[f"{prefix}.{name}_scale_inv"] = codes, scales
            values = decode_blocks(codes, scales)
            parts = {"gate_proj": values[:, : gate.shape[1]], "up_proj": values[:, gate.shape[1] :]}
            for projection, part in (parts if name == "gate_up_proj" else {"down_proj": values}).items():
                for expert in range(count):
                    decoded[f"{prefix}.{expert}.{projection}.weight"] = part[expert].contiguous()
    return FP8


def compressed_tensors(tensors: Tensors, decoded: Tensors) -> dict[str, Any]:
    for name in dense_names(tensors):
        tensors[name], tensors[f"{name}_scale"] = encode_blocks(tensors[name], torch.bfloat16)
        decoded[name] = decode_blocks(tensors[name], tensors[f"{name}_scale"])
    return COMPRESSED_TENSORS


def deepseek_v4(tensors: Tensors, decoded: Tensors) -> dict[str, Any]:
    """Dense layers in FP8 with e8m0 scales, experts in MXFP4 under the same kind of names."""
    for name in dense_names(tensors):
        weight = tensors.pop(name)
        if match := EXPERT.fullmatch(name):
            codes, scales = encode(weight)
            stem = f"{match[1]}.{match[2]}.{DEEPSEEK_NAMES[match[3]]}"
            tensors[f"{stem}.weight"] = codes.view(torch.int8)
            tensors[f"{stem}.scale"] = scales.view(torch.float8_e8m0fnu)
            decoded[name] = decode(codes, scales)
        else:
            stem = name.removesuffix(".weight")
            tensors[name], tensors[f"{stem}.scale"] = encode_blocks(weight, torch.float8_e8m0fnu)
            decoded[name] = decode_blocks(tensors[name], tensors[f"{stem}.scale"])
    return FP8 | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}


def shard(folder: Path, scales_first: bool) -> None:
    """Moves all scales into a file of their own, which is read before or after that of the weights."""
    tensors = read(folder)
    (folder / "model.safetensors").unlink()
    scales = {name for name in tensors if "scale_inv" in name}
    assert scales
    owners = {}
    for number, names in enumerate(
        (scales, tensors.keys() - scales) if scales_first else (tensors.keys() - scales, scales)
    ):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        owners |= dict.fromkeys(names, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": owners}))


Make = Callable[[Tensors, Tensors], dict[str, Any]]


def make(tiny_checkpoint: Path, folder: Path, quantize: Make) -> tuple[Path, Path]:
    """The FP8 checkpoint, and one with its values in float32."""
    tensors, decoded = read(tiny_checkpoint), Tensors()
    plain = dict(tensors)
    quantization = quantize(tensors, decoded)
    assert decoded.keys() <= plain.keys()
    return (
        write(tiny_checkpoint, folder / "fp8", tensors, quantization),
        write(tiny_checkpoint, folder / "decoded", plain | decoded, None),
    )


def parameters(checkpoint: Path, tier: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Of the text model, as the service has loaded them."""
    model = load(LlmSettings(model=str(checkpoint), block_size=16, tier=tier, **settings)).runner.model
    text = model.language_model if tier == "native" else model.model.language_model
    head = model.lm_head
    return dict(text.named_parameters()) | {f"lm_head.{name}": p for name, p in head.named_parameters()}


@pytest.mark.parametrize("quantize", [huggingface, stacked, compressed_tensors, deepseek_v4])
def test_tokens_equal_upstream_on_the_decoded_weights(
    tiny_checkpoint: Path, upstream: Upstream, samples: list[Sample], tmp_path: Path, quantize: Make
) -> None:
    fp8, decoded = make(tiny_checkpoint, tmp_path, quantize)
    model = Glm5NextForConditionalGeneration.from_pretrained(decoded).eval()
    reference = Upstream(model, upstream.tokenizer, upstream.processor)
    some = [s for s in samples if s.name in ("text-17", "text-300", "chat-lines", "two-images")]
    assert any(reference.generate(sample) != upstream.generate(sample) for sample in some), "FP8 changed nothing"
    with LlmOnLoopback(fp8) as service:
        assert wrong(reference, some, service.ask_all([request_of(sample) for sample in some])) == []


@pytest.mark.parametrize("tier", ["native", "upstream"])
@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [(huggingface, "float32"), (huggingface, "bfloat16"), (stacked, "float32"), (compressed_tensors, "bfloat16")],
)
def test_weights_equal_those_decoded_beforehand(
    tiny_checkpoint: Path, tmp_path: Path, quantize: Make, dtype: str, tier: str
) -> None:
    fp8, decoded = make(tiny_checkpoint, tmp_path, quantize)
    expected = parameters(decoded, tier, dtype=dtype)
    found = parameters(fp8, tier, dtype=dtype)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


def test_dense_weights_beside_packed_experts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    fp8, decoded = make(tiny_checkpoint, tmp_path, deepseek_v4)
    found, expected = parameters(fp8, "native"), parameters(decoded, "native")
    assert {name for name in expected if name not in found} == {name for name in expected if ".experts." in name}
    assert [name for name in found if not same_bits(found[name], expected[name])] == []
    with pytest.raises(LoadError, match="tier: upstream cannot run packed MXFP4 experts; use tier=native"):
        load(LlmSettings(model=str(fp8), tier="upstream"), never)


@pytest.mark.parametrize("scales_first", [True, False])
def test_scales_in_another_shard(
    tiny_checkpoint: Path, tmp_path: Path, scales_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are let go of as soon as they are decoded: no two pairs are alive at a time once scales come."""
    fp8, decoded = make(tiny_checkpoint, tmp_path, huggingface)
    shard(fp8, scales_first)
    before: list[weakref.ref[torch.Tensor]] = []

    def watched(names: tuple[str, str], codes: torch.Tensor, *others: Any) -> torch.Tensor:
        assert all(one() is None for one in before)
        before.append(weakref.ref(codes))
        return dequantize(names, codes, *others)

    dequantize = streamed.dequantize
    monkeypatch.setattr(streamed, "dequantize", watched)
    found, expected = parameters(fp8, "native"), parameters(decoded, "native")
    assert len(before) > 50
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


@pytest.mark.parametrize("scales_first", [True, False])
@pytest.mark.parametrize("tier", ["native", "upstream"])
def test_a_quantised_checkpoint_is_not_exempt_from_completeness(
    tiny_checkpoint: Path, tmp_path: Path, scales_first: bool, tier: str
) -> None:
    """Neither a whole shard nor one weight with its scales may be missing."""
    fp8, _ = make(tiny_checkpoint, tmp_path, huggingface)
    shard(fp8, scales_first)
    gone = fp8 / "model-00002-of-00002.safetensors"
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(LoadError, match=f"weight files are missing: {gone.name}"):
        load(LlmSettings(model=str(fp8), block_size=16, tier=tier), never)
    gone.write_bytes(content)
    index = json.loads((fp8 / INDEX_NAME).read_text())
    for name in ("lm_head.weight", "lm_head.weight_scale_inv"):
        del index["weight_map"][name]
    (fp8 / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"missing keys: .*lm_head\.weight"):
        load(LlmSettings(model=str(fp8), block_size=16, tier=tier))


def test_the_memory_estimate_is_of_the_wider_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    for quantize in (huggingface, compressed_tensors):
        fp8, decoded = make(tiny_checkpoint, tmp_path / quantize.__name__, quantize)
        for dtype in (torch.float32, torch.bfloat16):
            sizes = [
                find_native(
                    CheckpointSource(str(folder)), AutoConfig.from_pretrained(folder), FAMILIES["glm5_next"]
                ).resident_bytes(dtype)
                for folder in (fp8, decoded)
            ]
            assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("tier", ["native", "upstream"])
def test_the_config_may_keep_it_with_the_text_model(tiny_checkpoint: Path, tmp_path: Path, tier: str) -> None:
    fp8, decoded = make(tiny_checkpoint, tmp_path, huggingface)
    config = json.loads((fp8 / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (fp8 / "config.json").write_text(json.dumps(config))
    found, expected = parameters(fp8, tier), parameters(decoded, tier)
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


def spoil_block_size(tensors: Tensors, quantization: dict[str, Any]) -> None:
    quantization["weight_block_size"] = [64, 64]


def spoil_scheme(tensors: Tensors, quantization: dict[str, Any]) -> None:
    quantization["activation_scheme"] = "static"


def spoil_shape(tensors: Tensors, quantization: dict[str, Any]) -> None:
    tensors["lm_head.weight_scale_inv"] = tensors["lm_head.weight_scale_inv"][:-1].contiguous()


def lose_scale(tensors: Tensors, quantization: dict[str, Any]) -> None:
    del tensors["lm_head.weight_scale_inv"]


def lose_weight(tensors: Tensors, quantization: dict[str, Any]) -> None:
    del tensors["lm_head.weight"]


def lose_config(tensors: Tensors, quantization: dict[str, Any]) -> None:
    quantization.clear()


@pytest.mark.parametrize("tier", ["native", "upstream"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_block_size, r"quantization_config\.weight_block_size is \[64, 64\], served is \[128, 128\]"),
        (spoil_scheme, r"quantization_config\.activation_scheme is 'static', served is 'dynamic'"),
        (spoil_shape, r"lm_head\.weight_scale_inv: shape \[\d, 1\], lm_head.weight of .* needs \[\d, 1\]"),
        (lose_scale, r"lm_head\.weight: F8_E4M3 needs one tensor of scales"),
        (lose_weight, r"lm_head\.weight_scale_inv: scales without F8_E4M3 weights: there is no lm_head.weight"),
        (lose_config, r"quantization_config: absent, though .* is FP8"),
    ],
)
def test_refused_before_a_weight_is_read(
    tiny_checkpoint: Path,
    tmp_path: Path,
    spoil: Callable[[Tensors, dict[str, Any]], None],
    message: str,
    tier: str,
) -> None:
    tensors = read(tiny_checkpoint)
    quantization = huggingface(tensors, {})
    spoil(tensors, quantization)
    folder = write(tiny_checkpoint, tmp_path / "fp8", tensors, quantization or None)
    with pytest.raises(LoadError, match=message):
        load(LlmSettings(model=str(folder), block_size=16, tier=tier), never)


@pytest.mark.parametrize("tier", ["native", "upstream"])
def test_a_code_or_scale_that_is_not_a_number_is_named(tiny_checkpoint: Path, tmp_path: Path, tier: str) -> None:
    name = max(name for name in read(tiny_checkpoint) if EXPERT.fullmatch(name))
    for kind, spoilt in (("code", name), ("scale", f"{name}_scale_inv")):
        tensors = read(tiny_checkpoint)
        quantization = huggingface(tensors, {})
        if kind == "code":
            tensors[name].view(torch.uint8)[3, 5] = 0xFF
        else:
            tensors[spoilt][0, 0] = float("nan")
        folder = write(tiny_checkpoint, tmp_path / kind, tensors, quantization)
        with pytest.raises(LoadError, match=rf"{re.escape(spoilt)}: {kind} \["):
            load(LlmSettings(model=str(folder), block_size=16, tier=tier))
