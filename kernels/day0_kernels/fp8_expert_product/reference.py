"""Definition of the grouped expert product of FP8 rows and FP8 weights; it does not know who quantised the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.fp8_expert_gemm.reference import fp8_expert_gemm
from day0_kernels.mxfp4 import FP8_BLOCK
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)


def fp8_expert_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, block_scales: Tensor, expert_offsets: Tensor
) -> Tensor:
    """`out[i] = (weight[e] * its block scales) @ (x[i] * its scales)` for the rows i of expert e, bfloat16 `[N, Dout]`.

    `x` uint8 `[N, Din]` e4m3fn bits grouped by expert, `x_scales` float32 `[N, ceil(Din / 128)]`, one for 128 columns
    of a row; `weight` uint8 `[E, Dout, Din]` e4m3fn bits, `block_scales` float32
    `[E, ceil(Dout / 128), ceil(Din / 128)]`, `expert_offsets` int32 `[E + 1]` from 0 to N. Computed in float32. A NaN
    makes the outputs it reaches NaN.
    """
    scales = x_scales.repeat_interleave(FP8_BLOCK, 1)[:, : x.shape[1]]
    rows = x.view(torch.float8_e4m3fn).float() * scales
    return fp8_expert_gemm(rows, weight, block_scales, expert_offsets).to(torch.bfloat16)
