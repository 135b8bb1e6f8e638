"""MXFP4 experts served as they are published: the tokens of the same weights, decoded beforehand, under upstream."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm5NextForConditionalGeneration

from day0_kernels.mxfp4 import decode, encode
from llm_svc.build import LoadError
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tests.llm_svc.conftest import Sample, Upstream
from tests.llm_svc.packed import Tensors, read, write
from tests.llm_svc.test_parity import request_of, wrong
from tests.loopback import LlmOnLoopback

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}


def compressed_tensors(tensors: Tensors, decoded: Tensors) -> dict[str, Any]:
    for name in [name for name in tensors if EXPERT.fullmatch(name)]:
        codes, scales = encode(tensors.pop(name))
        tensors[f"{name}_packed"], tensors[f"{name}_scale"] = codes, scales
        decoded[name] = decode(codes, scales)
    return COMPRESSED_TENSORS


def deepseek(tensors: Tensors, decoded: Tensors) -> dict[str, Any]:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name in [name for name in tensors if EXPERT.fullmatch(name)]:
        match = EXPERT.fullmatch(name)
        assert match is not None
        codes, scales = encode(tensors.pop(name))
        stem = f"{match[1]}.{match[2]}.{names[match[3]]}"
        tensors[f"{stem}.weight"] = codes.view(torch.int8)
        tensors[f"{stem}.scale"] = scales.view(torch.float8_e8m0fnu)
        decoded[name] = decode(codes, scales)
    return {"quant_method": "fp8"}


def gpt_oss(tensors: Tensors, decoded: Tensors) -> dict[str, Any]:
    prefixes = sorted({match[1] for name in tensors if (match := EXPERT.fullmatch(name))})
    for prefix in prefixes:
        experts = 1 + max(int(m[2]) for name in tensors if (m := EXPERT.fullmatch(name)) and m[1] == prefix)
        stacked: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(experts):
            packed = {}
            for projection in ("gate_proj", "up_proj", "down_proj"):
                name = f"{prefix}.{expert}.{projection}.weight"
                packed[projection] = encode(tensors.pop(name))
                decoded[name] = decode(*packed[projection])
            pairs = zip(packed["gate_proj"], packed["up_proj"], strict=True)
            codes, scales = (torch.stack(pair, 1).flatten(0, 1) for pair in pairs)
            stacked["gate_up_proj"].append((codes, scales))
            stacked["down_proj"].append(packed["down_proj"])
        for projection, both in stacked.items():
            codes = torch.stack([codes for codes, _ in both])
            tensors[f"{prefix}.{projection}_blocks"] = codes.unflatten(-1, (-1, 16))
            tensors[f"{prefix}.{projection}_scales"] = torch.stack([scales for _, scales in both])
    return {"quant_method": "mxfp4"}


@pytest.mark.parametrize("pack", [compressed_tensors, gpt_oss, deepseek])
def test_tokens_equal_upstream_on_the_decoded_weights(
    tiny_checkpoint: Path,
    upstream: Upstream,
    samples: list[Sample],
    tmp_path: Path,
    pack: Callable[[Tensors, Tensors], dict[str, Any]],
) -> None:
    tensors = read(tiny_checkpoint)
    decoded: Tensors = {}
    plain = dict(tensors)
    quantization = pack(tensors, decoded)
    assert decoded
    packed_folder = write(tiny_checkpoint, tmp_path / "packed", tensors, quantization)
    plain_folder = write(tiny_checkpoint, tmp_path / "decoded", plain | decoded, None)
    model = Glm5NextForConditionalGeneration.from_pretrained(plain_folder).eval()
    reference = Upstream(model, upstream.tokenizer, upstream.processor)
    some = [s for s in samples if s.name in ("text-17", "text-300", "chat-lines", "two-images")]
    assert any(reference.generate(sample) != upstream.generate(sample) for sample in some), "packing changed nothing"
    with LlmOnLoopback(packed_folder) as service:
        assert service.llm.servicer.served.info.operator_backends["mxfp4_expert_gemm"] == "reference"
        assert wrong(reference, some, service.ask_all([request_of(sample) for sample in some])) == []


def test_upstream_tier_says_that_it_cannot(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = read(tiny_checkpoint)
    folder = write(tiny_checkpoint, tmp_path / "packed", tensors, compressed_tensors(tensors, {}))
    with pytest.raises(LoadError, match="tier: upstream cannot run packed MXFP4 experts; use tier=native"):
        load(LlmSettings(model=str(folder), tier="upstream"))


def test_layer_without_packed_experts_among_others_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = read(tiny_checkpoint)
    plain = dict(tensors)
    quantization = compressed_tensors(tensors, {})
    last = max(match[1] for name in plain if (match := EXPERT.fullmatch(name)))
    kept = {name: t for name, t in tensors.items() if not name.startswith(last + ".")}
    with pytest.raises(LoadError, match=f"no packed experts for {re.escape(last)}"):
        load(LlmSettings(model=str(write(tiny_checkpoint, tmp_path / "some", kept, quantization)), block_size=16))


def test_scale_that_is_not_a_number_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = read(tiny_checkpoint)
    quantization = compressed_tensors(tensors, {})
    name = max(name for name in tensors if name.endswith("weight_scale"))
    tensors[name][1, 0] = 255
    with pytest.raises(LoadError, match=re.escape(name)):
        load(LlmSettings(model=str(write(tiny_checkpoint, tmp_path / "nan", tensors, quantization)), block_size=16))


def test_other_quantisation_is_refused_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write(tiny_checkpoint, tmp_path / "fp8", read(tiny_checkpoint), {"quant_method": "fp8"})
    with pytest.raises(LoadError, match="quant_method is 'fp8'"):
        load(LlmSettings(model=str(folder), block_size=16))
