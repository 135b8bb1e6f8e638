"""The MXFP4 to FP8 conversion on an NVIDIA GPU; device code in `_triton_kernels`, for Hopper in `_gluon_kernels`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.mxfp4 import FP8_BLOCK, LOSSLESS_SPAN
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",))

_PLAIN = {"num_warps": 4}


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    return device_refusal(device)


def mxfp4_to_fp8(codes: Tensor, scales: Tensor, fp8: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, bit for bit, but for the scale byte 255: its block becomes NaN and its span is 255.

    (To raise would mean to wait for the device.) ValueError for an `fp8` with gaps.
    """
    if not fp8.is_contiguous():
        raise ValueError(f"fp8 must be contiguous, its strides are {fp8.stride()}")
    experts, rows, columns = fp8.shape
    blocks = (experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    block_scales = fp8.new_empty(blocks, dtype=torch.float32)
    spans = fp8.new_empty(blocks, dtype=torch.int32)
    if spans.numel() == 0:
        return block_scales, spans
    words, results = codes.contiguous().view(torch.int32), (fp8.view(torch.int32), block_scales, spans)
    # Tensors on the CPU mean the interpreter, which has no Hopper.
    whole = {} if fp8.device.type == "cpu" else configuration(__file__, fp8.device, "whole", spans.numel(), {})
    if whole and rows % FP8_BLOCK == 0 and columns % (FP8_BLOCK * whole["BLOCKS"]) == 0:
        from day0_kernels.mxfp4_to_fp8._gluon_kernels import convert_whole_kernel

        convert_whole_kernel[(spans.numel() // whole["BLOCKS"],)](
            words, scales.contiguous(), *results, N=rows, K=columns, LOSSLESS=LOSSLESS_SPAN, **whole
        )
    else:
        from day0_kernels.mxfp4_to_fp8._triton_kernels import convert_kernel

        convert_kernel[(spans.numel(),)](
            words,
            scales.contiguous(),
            *results,
            N=rows,
            K=columns,
            LOSSLESS=LOSSLESS_SPAN,
            **configuration(__file__, fp8.device, "convert", spans.numel(), _PLAIN),
        )
    return block_scales, spans
