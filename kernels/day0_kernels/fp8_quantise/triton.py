"""The quantisation of rows to FP8 on an NVIDIA GPU; the device code is in `_triton_kernels`, sizes in `sm_*.json`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.fp8_quantise.reference import MXFP4_BLOCK
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",))

_PLAIN = {"MOST": 4096, "num_warps": 4}


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    return device_refusal(device)


def fp8_quantise(x: Tensor, *, group: int, mxfp4_order: bool) -> tuple[Tensor, Tensor]:
    """As the reference, bit for bit. A program takes a whole row, or `MOST` of its columns where groups are 128."""
    from day0_kernels.fp8_quantise._triton_kernels import row_kernel

    rows, columns = x.shape
    if group not in (MXFP4_BLOCK, columns):
        raise ValueError(f"group must be {MXFP4_BLOCK} or all {columns} columns, is {group}")
    if mxfp4_order and columns % MXFP4_BLOCK:
        raise ValueError(f"Din must be a multiple of {MXFP4_BLOCK} for the MXFP4 order, is {columns}")
    q = x.new_empty(rows, columns, dtype=torch.uint8)
    x_scales = x.new_empty(rows, -(-columns // group), dtype=torch.float32)
    if rows == 0:
        return q, x_scales
    chosen = dict(configuration(__file__, x.device, "row", columns, _PLAIN))
    block = min(max(MXFP4_BLOCK, 1 << (columns - 1).bit_length()), chosen.pop("MOST"))
    row_kernel[(rows, -(-columns // block) if group == MXFP4_BLOCK else 1)](
        x.contiguous(), q, x_scales, K=columns, GROUP=group, ORDERED=mxfp4_order, SPAN=block, BLOCK=block, **chosen
    )
    return q, x_scales
