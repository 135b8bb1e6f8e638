"""FP8 weights with one scale for 128x128 of them: which tensors belong together, and their values; reads no file.

    weight        F8_E4M3 [..., N, K], called `X` (mostly `Y.weight`)
    its scales    [..., ceil(N / 128), ceil(K / 128)], called `X_scale_inv` (F32, BF16 or F8_E8M0), `Y.scale` (F8_E8M0,
                  as DeepSeek-V4 has it), or `X_scale` (compressed-tensors)

A value is its code times the scale of its block; "inv" says only that the scale is what to multiply with. A backend
that multiplies FP8 itself takes code and scale tensors as `find_scaled` pairs them; here they become a wider dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import torch
from torch import Tensor

from llm_svc.formats.format_error import FormatError
from svc_common.safetensors_header import TensorSpan

BLOCK_SIDE = 128
CODES_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
_LARGEST_CODE = 448.0
# `.scale` alone can be a parameter of a model.
_SCALES_ONLY = ("_scale_inv", ".weight_scale")
_OTHER_FP8 = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def find_scaled(spans: Mapping[str, TensorSpan]) -> dict[str, str]:
    """FP8 weights among a checkpoint's tensors, each with the name of its scales.

    FormatError, with the tensor's name, for codes without scales or with two, another dtype, and scales whose shape is
    not that of the blocks.
    """
    found = {}
    for name, span in spans.items():
        if span.dtype in _OTHER_FP8:
            raise FormatError(f"{name}: dtype {span.dtype}; of FP8 weights only {CODES_DTYPE} is served")
        if span.dtype == CODES_DTYPE:
            found[name] = _scales_of(span, spans)
    return found


def refuse_stray_scales(spans: Mapping[str, TensorSpan], claimed: Set[str]) -> None:
    """FormatError for the first tensor, by name, that is not among those of a format and can only be scales."""
    for name in sorted(spans.keys() - claimed):
        if spans[name].dtype != "F8_E8M0" and not name.endswith(_SCALES_ONLY):
            continue
        weight = _weight_of(name)
        there = f"{weight} is {spans[weight].dtype}" if weight in spans else f"there is no {weight}"
        raise FormatError(f"{name}: scales without {CODES_DTYPE} weights: {there}")


def _weight_of(scale: str) -> str:
    if scale.endswith(".scale"):
        return f"{scale.removesuffix('.scale')}.weight"
    return scale.removesuffix("_scale_inv").removesuffix("_scale")


def _scales_of(weight: TensorSpan, spans: Mapping[str, TensorSpan]) -> str:
    names = [f"{weight.name}_scale_inv", f"{weight.name}_scale"]
    if weight.name.endswith(".weight"):
        names.append(f"{weight.name.removesuffix('.weight')}.scale")
    there = [name for name in names if name in spans]
    if len(there) != 1:
        had = f"two of them: {', '.join(there)}" if there else f"none is called {' or '.join(names)}"
        raise FormatError(f"{weight.name}: {CODES_DTYPE} needs one tensor of scales, and {had}")
    scales = spans[there[0]]
    if scales.dtype not in SCALE_DTYPES:
        raise FormatError(f"{scales.name}: dtype {scales.dtype}, must be one of {', '.join(SCALE_DTYPES)}")
    if len(weight.shape) < 2:
        raise FormatError(f"{weight.name}: shape {list(weight.shape)} is no matrix")
    *leading, rows, columns = weight.shape
    wanted = [*leading, -(-rows // BLOCK_SIDE), -(-columns // BLOCK_SIDE)]
    if list(scales.shape) != wanted:
        raise FormatError(
            f"{scales.name}: shape {list(scales.shape)}, {weight.name} of {list(weight.shape)} in blocks of "
            f"{BLOCK_SIDE}x{BLOCK_SIDE} needs {wanted}"
        )
    return scales.name


def dequantize(names: tuple[str, str], codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn `[..., N, K]` and their scales as `[..., N, K]` of `dtype`; `names` are what errors call the two.

    The product is rounded to float32 and then to `dtype`. Memory beside both is that of some 128 rows in float32.
    FormatError for a code that is NaN, a scale that is negative or not finite, and a value beyond `dtype`.
    """
    weight_name, scale_name = names
    wide = scales.float()
    if bad := _first(~(wide.isfinite() & (wide >= 0))):
        raise FormatError(f"{scale_name}: scale {bad} is {wide[tuple(bad)].item()}, must be finite and not negative")
    values = torch.empty(codes.shape, dtype=dtype)
    rows, columns = codes.shape[-2:]
    matrices = math.prod(codes.shape[:-2])
    overflows = wide.numel() > 0 and wide.max().item() * _LARGEST_CODE > torch.finfo(dtype).max
    source, target = codes.view(matrices, rows, columns), values.view(matrices, rows, columns)
    by_matrix = wide.view(matrices, *wide.shape[-2:])
    for matrix in range(matrices):
        for begin in range(0, rows, BLOCK_SIDE):
            block_rows = source[matrix, begin : begin + BLOCK_SIDE]
            if int((block_rows.view(torch.uint8) & 0x7F).max()) == 0x7F:
                place = _first(codes.isnan())
                raise FormatError(f"{weight_name}: code {place} is {_byte(codes, place)}, which is NaN")
            row_scales = by_matrix[matrix, begin // BLOCK_SIDE].repeat_interleave(BLOCK_SIDE)[:columns]
            product = _scaled(block_rows, row_scales)
            target[matrix, begin : begin + BLOCK_SIDE] = product
    if overflows and (bad := _first(~values.isfinite())):
        raise FormatError(f"{weight_name}: value {bad} is beyond {str(dtype).removeprefix('torch.')}")
    return values


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes `[R, K]` times scales `[K]` in float32, rounded once.

    e4m3 shifted by 7 bits, its sign by 8, is float16 of 2^-8 of the value, subnormals too; that is several times as
    fast as torch's own conversion.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float().mul_(256.0).mul_(scales)


def _first(bad: Tensor) -> list[int]:
    """Where the first True of a tensor is, empty when there is none."""
    places = bad.nonzero()
    return places[0].tolist() if len(places) else []


def _byte(codes: Tensor, place: list[int]) -> str:
    return f"0x{int(codes.view(torch.uint8)[tuple(place)]):02X}"
