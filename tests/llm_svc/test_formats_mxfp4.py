"""One asymmetric expert in each MXFP4 checkpoint format: the same bits, the same answer, and every fault named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from day0_kernels.comparison import same_bits
from day0_kernels.mxfp4 import decode
from day0_kernels.mxfp4_expert_gemm.reference import mxfp4_expert_gemm
from llm_svc.formats.format_error import FormatError
from llm_svc.formats.mxfp4 import (
    PackedExperts,
    PackedFormat,
    PackedWeight,
    find_experts,
    read_experts,
)

DATA = Path(__file__).resolve().parents[1] / "data"
EXPERTS, INNER, HIDDEN = 3, 32, 96
PREFIX = "model.layers.7.mlp.experts"
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The first four outputs of experts 0 and 2 for `_hidden`, computed from `_code`, `_scale` and the MLP's formula alone.
GOLDEN = {
    0: [-0.0750345852, 0.0989212973, 0.0634852503, 0.0550159438],
    2: [-0.573956788, 0.753183755, -0.0351122285, 0.0383613984],
}

Tensors = dict[str, Tensor]


def _code(projection: str, expert: int, row: int, column: int) -> int:
    """Neither symmetric in rows and columns nor alike in two projections; neighbours in a byte differ."""
    offset = {"gate": 1, "up": 4, "down": 9}[projection]
    return (7 * row + 3 * column + column // 5 + 5 * expert + offset) % 16


def _scale(projection: str, expert: int, row: int, group: int) -> int:
    return {"gate": 122, "up": 121, "down": 123}[projection] + (row + 2 * group + expert) % 4


def _packed(projection: str, expert: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of bytes, low nibble first, and rows of scale bytes."""
    rows, columns = SHAPES[projection]
    codes = [
        [
            _code(projection, expert, row, 2 * j) | _code(projection, expert, row, 2 * j + 1) << 4
            for j in range(columns // 2)
        ]
        for row in range(rows)
    ]
    return codes, [[_scale(projection, expert, row, group) for group in range(columns // 32)] for row in range(rows)]


def _bytes(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def _gpt_oss() -> Tensors:
    tensors = {}
    gate_up, down = [], []
    for expert in range(EXPERTS):
        (gate, gate_scales), (up, up_scales) = _packed("gate", expert), _packed("up", expert)
        codes = [row for pair in zip(gate, up, strict=True) for row in pair]
        scales = [row for pair in zip(gate_scales, up_scales, strict=True) for row in pair]
        gate_up.append((codes, scales))
        down.append(_packed("down", expert))
    for name, parts in (("gate_up_proj", gate_up), ("down_proj", down)):
        tensors[f"{PREFIX}.{name}_blocks"] = _bytes([codes for codes, _ in parts]).unflatten(-1, (-1, 16))
        tensors[f"{PREFIX}.{name}_scales"] = _bytes([scales for _, scales in parts])
        tensors[f"{PREFIX}.{name}_bias"] = torch.zeros(EXPERTS, 1)
    return tensors


def _single(names: dict[str, str], codes_suffix: str, scales_suffix: str, codes_type: Any, scales_type: Any) -> Tensors:
    tensors = {}
    for expert in range(EXPERTS):
        for projection, name in names.items():
            codes, scales = _packed(projection, expert)
            tensors[f"{PREFIX}.{expert}.{name}.{codes_suffix}"] = _bytes(codes).view(codes_type)
            tensors[f"{PREFIX}.{expert}.{name}.{scales_suffix}"] = _bytes(scales).view(scales_type)
    return tensors


def _compressed_tensors(names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensors:
    naming = dict(zip(("gate", "up", "down"), names, strict=True))
    return _single(naming, "weight_packed", "weight_scale", torch.uint8, torch.uint8)


def _deepseek() -> Tensors:
    return _single({"gate": "w1", "up": "w3", "down": "w2"}, "weight", "scale", torch.int8, torch.float8_e8m0fnu)


FORMATS: dict[str, tuple[Callable[[], Tensors], PackedFormat]] = {
    "gpt_oss": (_gpt_oss, PackedFormat.GPT_OSS),
    "compressed_tensors": (_compressed_tensors, PackedFormat.COMPRESSED_TENSORS),
    "compressed_tensors_w123": (lambda: _compressed_tensors(("w1", "w3", "w2")), PackedFormat.COMPRESSED_TENSORS),
    "deepseek": (_deepseek, PackedFormat.DEEPSEEK),
}


PLACE_OF_GATE = {
    "gpt_oss": ("gate_up_proj_blocks", "gate_up_proj_scales"),
    "compressed_tensors": ("0.gate_proj.weight_packed", "0.gate_proj.weight_scale"),
    "compressed_tensors_w123": ("0.w1.weight_packed", "0.w1.weight_scale"),
    "deepseek": ("0.w1.weight", "0.w1.scale"),
}


def _read(tensors: Tensors) -> PackedExperts:
    (found,) = find_experts(tensors)
    return read_experts(found, tensors.__getitem__)


def _value(projection: str, expert: int, row: int, column: int) -> float:
    code = _code(projection, expert, row, column)
    magnitude = math.ldexp(VALUES[code & 7], _scale(projection, expert, row, column // 32) - 127)
    return -magnitude if code & 8 else magnitude


def _hidden() -> list[float]:
    return [math.sin(1 + 0.7 * k) for k in range(HIDDEN)]


def _answer(expert: int) -> list[float]:
    """down @ (silu(gate @ x) * (up @ x)), in Python's own arithmetic."""
    x = _hidden()

    def product(projection: str, vector: list[float]) -> list[float]:
        rows, columns = SHAPES[projection]
        return [
            math.fsum(_value(projection, expert, row, k) * vector[k] for k in range(columns)) for row in range(rows)
        ]

    gate, up = product("gate", x), product("up", x)
    return product("down", [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)])


def _mlp(experts: PackedExperts, expert: int) -> Tensor:
    """The whole expert on our operator, `[HIDDEN]`."""
    x = torch.tensor([_hidden()])
    offsets = torch.tensor([int(e > expert) for e in range(EXPERTS + 1)], dtype=torch.int32)
    gate, up = mxfp4_expert_gemm(x, experts.gate_up.codes, experts.gate_up.scales, offsets).chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    return mxfp4_expert_gemm(gated, experts.down.codes, experts.down.scales, offsets)[0]


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_recognised_with_all_its_tensors(name: str) -> None:
    make, kind = FORMATS[name]
    tensors = make()
    (found,) = find_experts([*tensors, "model.layers.7.mlp.shared_experts.w1.scale", "model.layers.7.mlp.gate.weight"])
    assert (found.prefix, found.format) == (PREFIX, kind)
    assert set(found.names) == {key for key in tensors if not key.endswith("_bias")}
    assert len(found.names) == len(set(found.names))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_bits(name: str) -> None:
    experts = _read(FORMATS[name][0]())
    assert experts.gate_up.codes.shape == (EXPERTS, 2 * INNER, HIDDEN // 2)
    for expert in range(EXPERTS):
        gate, up, down = (_packed(projection, expert) for projection in ("gate", "up", "down"))
        for part, number in ((experts.gate_up, 0), (experts.down, 1)):
            codes, scales = (gate[i] + up[i] for i in (0, 1)) if number == 0 else down
            assert same_bits(part.codes[expert], _bytes(codes))
            assert same_bits(part.scales[expert], _bytes(scales))


@pytest.mark.parametrize("expert", sorted(GOLDEN))
@pytest.mark.parametrize("name", FORMATS)
def test_the_golden_expert_through_the_whole_mlp(name: str, expert: int) -> None:
    out = _mlp(_read(FORMATS[name][0]()), expert)
    assert out[:4].tolist() == pytest.approx(GOLDEN[expert], rel=1e-5)
    assert out.tolist() == pytest.approx(_answer(expert), rel=1e-4, abs=1e-5)


def test_upstream_decodes_gpt_oss_to_the_same_values() -> None:
    """Upstream keeps the pairs of gate and up interleaved, and rows and columns transposed."""
    tensors = _gpt_oss()
    experts = _read(tensors)
    for weight, name in ((experts.gate_up, "gate_up_proj"), (experts.down, "down_proj")):
        blocks, scales = (tensors[f"{PREFIX}.{name}_{part}"] for part in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        if name == "gate_up_proj":
            theirs = torch.cat((theirs[:, ::2], theirs[:, 1::2]), 1)
        assert same_bits(decode(weight.codes, weight.scales), theirs.contiguous())


def test_the_golden_expert_tells_the_classic_errors_apart() -> None:
    experts = _read(_compressed_tensors())
    gate_up, down = experts.gate_up, experts.down

    def swapped(codes: Tensor) -> Tensor:
        return (codes >> 4) | (codes << 4)

    def regrouped(weight: PackedWeight, order: Callable[[Tensor], Tensor]) -> PackedWeight:
        return PackedWeight(order(weight.codes), order(weight.scales))

    wrong = {
        "high nibble first": PackedExperts(PackedWeight(swapped(gate_up.codes), gate_up.scales), down),
        "high nibble first in down": PackedExperts(gate_up, PackedWeight(swapped(down.codes), down.scales)),
        "up before gate": PackedExperts(regrouped(gate_up, lambda t: t.roll(INNER, 1)), down),
        "interleaved rows": PackedExperts(
            regrouped(gate_up, lambda t: t.unflatten(1, (2, INNER)).transpose(1, 2).flatten(1, 2)), down
        ),
        "bias of 125": PackedExperts(PackedWeight(gate_up.codes, gate_up.scales + 2), down),
        "another expert": PackedExperts(
            regrouped(gate_up, lambda t: t.roll(1, 0)), regrouped(down, lambda t: t.roll(1, 0))
        ),
    }
    for name, mistaken in wrong.items():
        distance = (_mlp(mistaken, 0)[:4] - torch.tensor(GOLDEN[0])).norm() / torch.tensor(GOLDEN[0]).norm()
        assert distance > 0.1, name


def test_the_published_block_in_every_format() -> None:
    """Cases 54 and 55: low nibble first and e8m0 scales, byte 0 included, from one row of 32 columns."""
    block = torch.frombuffer(bytearray((DATA / "mxfp4_block.bin").read_bytes()), dtype=torch.uint8)
    expected = json.loads((DATA / "mxfp4_expected.json").read_text())
    for name, (make, _) in FORMATS.items():
        tensors = make()
        codes, scales = PLACE_OF_GATE[name]
        tensors[f"{PREFIX}.{codes}"].view(torch.uint8).view(-1)[:16] = block
        tensors[f"{PREFIX}.{scales}"].view(torch.uint8).view(-1)[0] = 0
        experts = _read(tensors)
        got = decode(experts.gate_up.codes[0, :1], experts.gate_up.scales[0, :1])[0, :32]
        want = torch.tensor(expected["values_scale127"]) * expected["scale0_is"]
        assert same_bits(got, want), name


def test_an_e8m0_file_is_read_by_its_bytes_and_its_nan_refused() -> None:
    """Case 54: the file holds the bytes 0, 127 and 255; as numbers they would be 0, 1 and NaN."""
    scales = load_file(DATA / "st_e8m0_ok.safetensors")["s"]
    assert scales.view(torch.uint8).tolist() == [0, 127, 255]
    tensors = _deepseek()
    key = f"{PREFIX}.1.w3.scale"
    tensors[key].view(torch.uint8)[4, :2] = scales.view(torch.uint8)[:2]
    assert _read(tensors).gate_up.scales[1, INNER + 4, :2].tolist() == [0, 127]
    tensors[key].view(torch.uint8)[4] = scales.view(torch.uint8)
    with pytest.raises(FormatError, match=rf"{key}: scale byte \[4, 2\] is 255, which is NaN"):
        _read(tensors)


@pytest.mark.parametrize("name", FORMATS)
def test_the_scale_byte_255_is_refused_with_the_tensors_name(name: str) -> None:
    tensors = FORMATS[name][0]()
    for key in [key for key in tensors if key.endswith(("scale", "scales"))]:
        place = tensors[key].view(torch.uint8).view(-1)
        kept, place[-1] = int(place[-1]), 255
        with pytest.raises(FormatError, match=f"{key}: scale byte .* is 255"):
            _read(tensors)
        place[-1] = kept
    _read(tensors)


def _narrow(tensors: Tensors, key: str, columns: int) -> None:
    tensors[key] = tensors[key][:, :columns]


def _retype(tensors: Tensors, key: str, dtype: torch.dtype) -> None:
    tensors[key] = tensors[key].to(dtype)


P0 = f"{PREFIX}.0"
FAULTS: list[tuple[str, Callable[[Tensors], object], str]] = [
    (
        "compressed_tensors",
        lambda t: _narrow(t, f"{P0}.up_proj.weight_packed", 24),
        "up_proj.weight_packed: 48 columns",
    ),
    ("compressed_tensors", lambda t: _narrow(t, f"{P0}.up_proj.weight_packed", 0), "up_proj.weight_packed: 0 columns"),
    ("deepseek", lambda t: _narrow(t, f"{PREFIX}.2.w2.weight", 8), "2.w2.weight: 16 columns are no multiple of 32"),
    (
        "compressed_tensors",
        lambda t: _narrow(t, f"{P0}.gate_proj.weight_scale", 2),
        r"0.gate_proj.weight_scale: shape \[32, 2\], its codes need \[32, 3\]",
    ),
    (
        "compressed_tensors",
        lambda t: _retype(t, f"{P0}.gate_proj.weight_scale", torch.float8_e4m3fn),
        "gate_proj.weight_scale: float8_e4m3fn .* must be uint8 or float8_e8m0fnu",
    ),
    (
        "compressed_tensors",
        lambda t: _retype(t, f"{P0}.gate_proj.weight_packed", torch.int32),
        "gate_proj.weight_packed: int32 .* must be uint8",
    ),
    ("deepseek", lambda t: _retype(t, f"{P0}.w1.weight", torch.float8_e4m3fn), "w1.weight: float8_e4m3fn"),
    ("deepseek", lambda t: t.pop(f"{PREFIX}.1.w3.weight"), "experts.1.w3.weight: missing"),
    ("compressed_tensors", lambda t: t.pop(f"{PREFIX}.1.up_proj.weight_scale"), "1.up_proj.weight_scale: missing"),
    ("gpt_oss", lambda t: t.pop(f"{PREFIX}.down_proj_blocks"), "down_proj_blocks: missing"),
    (
        "gpt_oss",
        lambda t: t.update({f"{PREFIX}.down_proj_blocks": t[f"{PREFIX}.down_proj_blocks"].flatten(-2)}),
        r"down_proj_blocks: uint8 \[3, 96, 16\], must be uint8 \[E, N, K / 32, 16\]",
    ),
    (
        "gpt_oss",
        lambda t: t.update({key: t[key][:, :-1] for key in t if "gate_up" in key and "bias" not in key}),
        "gate_up_proj_blocks: 63 rows are no pairs",
    ),
    (
        "gpt_oss",
        lambda t: t.update({key: t[key][:2] for key in t if "down" in key}),
        r"down has \[2, 96, 16\] packed bytes, gate and up of \[3, 64, 48\] need \[3, 96, 16\]",
    ),
    (
        "compressed_tensors",
        lambda t: t.update({key: t[key][:16] for key in t if ".2.up_proj" in key}),
        r"experts.2.up_proj: \[16, 48\] packed bytes, the experts before it have \[32, 48\]",
    ),
    ("deepseek", lambda t: t.update({f"{P0}.w9.scale": t[f"{P0}.w1.scale"]}), "projections are .*'w9'.* known are"),
    ("gpt_oss", lambda t: t.update(_deepseek()), "packed as gpt_oss and as deepseek"),
]


@pytest.mark.parametrize(("name", "break_it", "message"), FAULTS)
def test_a_fault_names_the_tensor(name: str, break_it: Callable[[Tensors], object], message: str) -> None:
    tensors = FORMATS[name][0]()
    break_it(tensors)
    with pytest.raises(FormatError, match=message):
        _read(tensors)


def test_a_plain_checkpoint_has_no_packed_experts() -> None:
    assert find_experts([f"{P0}.gate_proj.weight", f"{PREFIX}.gate_up_proj", "model.layers.0.mlp.w1.scale"]) == []
