"""The gate between an expert's two products on an NVIDIA GPU; device code is in `_triton_kernels`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.swiglu.reference import GROUP
from day0_kernels.triton_launch import PRIORITY, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

_LARGEST_BLOCK = 2048


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    if operator == "swiglu_fp8" and sizes.get("F", GROUP) % GROUP:
        return f"F must be a multiple of {GROUP}, is {sizes['F']}"
    return device_refusal(device)


def swiglu(gate_up: Tensor, *, limit: float | None, alpha: float, up_offset: float) -> Tensor:
    """As the reference, in one launch."""
    from day0_kernels.swiglu._triton_kernels import gate_kernel

    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows == 0:
        return out
    block = min(_LARGEST_BLOCK, 1 << (width - 1).bit_length())
    gate_kernel[(rows, -(-width // block))](
        gate_up.contiguous(),
        out,
        float(limit or 0.0),
        float(alpha),
        float(up_offset),
        F=width,
        LIMITED=limit is not None,
        BLOCK_F=block,
        num_warps=4,
    )
    return out


def swiglu_fp8(gate_up: Tensor, *, limit: float | None, alpha: float, up_offset: float) -> tuple[Tensor, Tensor]:
    """As the reference, in one launch; ValueError where F is no multiple of 128."""
    from day0_kernels.swiglu._triton_kernels import gate_fp8_kernel

    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if width % GROUP:
        raise ValueError(f"F must be a multiple of {GROUP}, is {width}")
    values = gate_up.new_empty(rows, width, dtype=torch.uint8)
    scales = gate_up.new_empty(rows, width // GROUP, dtype=torch.float32)
    if rows == 0:
        return values, scales
    groups = min(_LARGEST_BLOCK // GROUP, 1 << (width // GROUP - 1).bit_length())
    gate_fp8_kernel[(rows, -(-width // (groups * GROUP)))](
        gate_up.contiguous(),
        values.view(torch.float8_e4m3fn),
        scales,
        float(limit or 0.0),
        float(alpha),
        float(up_offset),
        F=width,
        LIMITED=limit is not None,
        GROUPS=groups,
        num_warps=4,
    )
    return values, scales
