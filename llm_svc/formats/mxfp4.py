"""Reads the routed experts of the three MXFP4 checkpoint formats into one layout; it knows no file and no model.

    gpt_oss             {prefix}.gate_up_proj_blocks uint8 [E, 2I, H / 32, 16], rows g0, u0, g1, u1, ...
                        {prefix}.gate_up_proj_scales uint8 [E, 2I, H / 32], and so down_proj [E, H, I / 32, ...]
    compressed-tensors  {prefix}.{e}.gate_proj.weight_packed uint8 [I, H / 2], .weight_scale uint8 [I, H / 32],
                        and so up_proj and down_proj; or w1 (gate), w3 (up), w2 (down)
    deepseek            {prefix}.{e}.w1.weight int8 [I, H / 2], .scale e8m0 [I, H / 32]; w1 gate, w3 up, w2 down

All three put the low nibble first and count scales from 2^-127.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from day0_kernels.mxfp4 import GROUP_SIZE, first_nan_scale
from llm_svc.formats.format_error import FormatError


class PackedFormat(StrEnum):
    """How a checkpoint stores packed experts."""

    GPT_OSS = "gpt_oss"
    COMPRESSED_TENSORS = "mxfp4-pack-quantized"
    DEEPSEEK = "deepseek"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix per expert: codes uint8 `[E, N, K / 2]`, scales uint8 `[E, N, K / 32]` (see day0_kernels.mxfp4)."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of a layer: `gate_up [E, 2I, H]` with the gate's rows first, `down [E, H, I]`."""

    gate_up: PackedWeight
    down: PackedWeight


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """The packed experts of one layer, by their names in the checkpoint.

    `prefix` ends before the expert number or the projection; `projections` are the names of gate, up and down there.
    """

    prefix: str
    format: PackedFormat
    experts: int
    projections: tuple[str, str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor `read_experts` will ask for."""
        if self.format is PackedFormat.GPT_OSS:
            both = ("gate_up_proj", "down_proj")
            return tuple(f"{self.prefix}.{projection}_{part}" for projection in both for part in ("blocks", "scales"))
        codes, scales = _SUFFIXES[self.format]
        return tuple(
            f"{self.prefix}.{expert}.{projection}.{suffix}"
            for expert in range(self.experts)
            for projection in self.projections
            for suffix in (codes, scales)
        )


_SUFFIXES = {
    PackedFormat.COMPRESSED_TENSORS: ("weight_packed", "weight_scale"),
    PackedFormat.DEEPSEEK: ("weight", "scale"),
}
_NAMINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_STACKED = re.compile(r"(.+\.experts)\.(?:gate_up_proj|down_proj)_(?:blocks|scales)")
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(weight_packed|weight_scale|scale)")


def find_experts(names: Iterable[str]) -> list[FoundExperts]:
    """The packed experts among a checkpoint's tensor names, one entry a layer, sorted by prefix.

    DeepSeek's packed weights are called as plain ones are; the `scale` beside them tells. FormatError where a tensor of
    a layer is missing (names it) or two formats share a prefix.
    """
    known = set(names)
    found: dict[str, FoundExperts] = {}
    singles: dict[tuple[str, PackedFormat], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in known:
        if match := _STACKED.fullmatch(name):
            found[match[1]] = FoundExperts(match[1], PackedFormat.GPT_OSS, 0, _NAMINGS[0])
        elif match := _SINGLE.fullmatch(name):
            kind = PackedFormat.DEEPSEEK if match[4] == "scale" else PackedFormat.COMPRESSED_TENSORS
            singles[match[1], kind][match[3]].add(int(match[2]))
    for (prefix, kind), projections in singles.items():
        if prefix in found:
            raise FormatError(f"{prefix}: its experts are packed as {found[prefix].format} and as {kind}")
        naming = next((naming for naming in _NAMINGS if projections.keys() <= set(naming)), None)
        if naming is None:
            allowed = " or ".join("/".join(naming) for naming in _NAMINGS)
            raise FormatError(f"{prefix}: projections are {sorted(projections)}, known are {allowed}")
        experts = 1 + max(max(numbers) for numbers in projections.values())
        found[prefix] = FoundExperts(prefix, kind, experts, naming)
    for experts_found in found.values():
        for name in experts_found.names:
            if name not in known:
                raise FormatError(f"{name}: missing, though {experts_found.prefix} is packed {experts_found.format}")
    return [found[prefix] for prefix in sorted(found)]


def read_experts(found: FoundExperts, tensor: Callable[[str], Tensor]) -> PackedExperts:
    """The experts of one layer in our layout; `tensor(name)` gives one tensor of the checkpoint, asked once each.

    Tensors stored one per expert are copied into their place one by one, so at most one is held beside the result.
    FormatError for a dtype or shape that is not the format's, a size that is no multiple of 32, a scale byte 255
    (names the tensor and the place), and matrices that do not belong together.
    """
    if found.format is PackedFormat.GPT_OSS:
        gate_up_name, down_name = (f"{found.prefix}.{projection}" for projection in ("gate_up_proj", "down_proj"))
        gate_up = _stacked(gate_up_name, tensor)
        if gate_up.codes.shape[1] % 2:
            raise FormatError(f"{gate_up_name}_blocks: {gate_up.codes.shape[1]} rows are no pairs of gate and up")
        gate_up = PackedWeight(_deinterleaved(gate_up.codes), _deinterleaved(gate_up.scales))
        down = _stacked(down_name, tensor)
    else:
        gate_up, down = _gathered(found, tensor)
    experts, rows, packed = gate_up.codes.shape
    wanted = (experts, 2 * packed, rows // 4)
    if tuple(down.codes.shape) != wanted:
        raise FormatError(
            f"{found.prefix}: down has {list(down.codes.shape)} packed bytes, gate and up of "
            f"{list(gate_up.codes.shape)} need {list(wanted)}"
        )
    return PackedExperts(gate_up, down)


def _deinterleaved(rows: Tensor) -> Tensor:
    """Rows g0, u0, g1, u1, ... of `[E, 2I, ...]` as g0, g1, ..., u0, u1, ..."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)


def _stacked(name: str, tensor: Callable[[str], Tensor]) -> PackedWeight:
    """A gpt_oss pair as codes `[E, N, K / 2]` and scales `[E, N, K / 32]`."""
    blocks = tensor(f"{name}_blocks")
    if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[-1] != GROUP_SIZE // 2:
        raise FormatError(
            f"{name}_blocks: {_described(blocks)}, must be uint8 [E, N, K / {GROUP_SIZE}, {GROUP_SIZE // 2}]"
        )
    codes = blocks.flatten(-2)
    return PackedWeight(codes, _checked_scales(f"{name}_scales", tensor(f"{name}_scales"), codes))


def _gathered(found: FoundExperts, tensor: Callable[[str], Tensor]) -> tuple[PackedWeight, PackedWeight]:
    """Per-expert pairs as `[E, 2I, H]` (gate above up) and `[E, H, I]`."""
    codes_suffix, scales_suffix = _SUFFIXES[found.format]
    gate_up: PackedWeight | None = None
    down: PackedWeight | None = None
    for expert in range(found.experts):
        for number, projection in enumerate(found.projections):
            stem = f"{found.prefix}.{expert}.{projection}"
            codes = _checked_codes(f"{stem}.{codes_suffix}", tensor(f"{stem}.{codes_suffix}"), found.format)
            scales = _checked_scales(f"{stem}.{scales_suffix}", tensor(f"{stem}.{scales_suffix}"), codes)
            if number < 2:
                gate_up = gate_up or _allocated(found.experts, 2 * len(codes), codes, scales)
                _place(stem, gate_up, expert, number, 2, codes, scales)
            else:
                down = down or _allocated(found.experts, len(codes), codes, scales)
                _place(stem, down, expert, 0, 1, codes, scales)
    assert gate_up is not None and down is not None
    return gate_up, down


def _allocated(experts: int, rows: int, codes: Tensor, scales: Tensor) -> PackedWeight:
    return PackedWeight(
        codes.new_empty(experts, rows, codes.shape[1]), scales.new_empty(experts, rows, scales.shape[1])
    )


def _place(stem: str, target: PackedWeight, expert: int, part: int, parts: int, codes: Tensor, scales: Tensor) -> None:
    rows = target.codes.shape[1] // parts
    if codes.shape != (rows, target.codes.shape[2]):
        raise FormatError(
            f"{stem}: {list(codes.shape)} packed bytes, the experts before it have {[rows, target.codes.shape[2]]}"
        )
    target.codes[expert, part * rows : (part + 1) * rows] = codes
    target.scales[expert, part * rows : (part + 1) * rows] = scales


def _checked_codes(name: str, codes: Tensor, kind: PackedFormat) -> Tensor:
    """Packed codes uint8 `[N, K / 2]` as they are in memory."""
    allowed = (torch.uint8,) if kind is PackedFormat.COMPRESSED_TENSORS else (torch.int8, torch.uint8)
    if codes.dtype not in allowed or codes.dim() != 2:
        wanted = " or ".join(_name_of(dtype) for dtype in allowed)
        raise FormatError(f"{name}: {_described(codes)}, must be {wanted} [N, K / 2]")
    if codes.shape[1] * 2 % GROUP_SIZE or not codes.shape[1]:
        raise FormatError(f"{name}: {codes.shape[1] * 2} columns are no multiple of {GROUP_SIZE}")
    return codes.view(torch.uint8)


def _checked_scales(name: str, scales: Tensor, codes: Tensor) -> Tensor:
    """Scale bytes uint8 of packed codes `[..., N, K / 2]`; an e8m0 tensor is taken by its bytes, never as numbers."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise FormatError(f"{name}: {_described(scales)}, must be uint8 or float8_e8m0fnu")
    wanted = (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP_SIZE)
    if tuple(scales.shape) != wanted:
        raise FormatError(f"{name}: shape {list(scales.shape)}, its codes need {list(wanted)}")
    scales = scales.view(torch.uint8)
    nan = first_nan_scale(scales)
    if nan is not None:
        raise FormatError(f"{name}: scale byte {list(nan)} is 255, which is NaN")
    return scales


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(tensor: Tensor) -> str:
    return f"{_name_of(tensor.dtype)} {list(tensor.shape)}"
