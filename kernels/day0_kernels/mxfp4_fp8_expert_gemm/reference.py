"""Definition of the grouped expert product of FP8 rows and MXFP4 weights; it does not know who quantised the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.fp8_quantise.reference import from_mxfp4_order
from day0_kernels.mxfp4_expert_gemm.reference import mxfp4_expert_gemm
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)


def mxfp4_fp8_expert_gemm(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    tops: Tensor,
    expert_offsets: Tensor,
    *,
    by_group: bool,
) -> Tensor:
    """`out[i] = decode(codes[e], scales[e]) @ (x[i] * x_scales[i])` for the rows i of expert e, in bfloat16.

    `x` uint8 `[N, Din]`, e4m3fn bits as `fp8_quantise(.., group=Din, mxfp4_order=True)` gives them beside `x_scales`
    float32 `[N, 1]`; Din a multiple of 128. `codes` uint8 `[E, Dout, Din / 2]`, `scales` uint8 `[E, Dout, Din / 32]`,
    `expert_offsets` int32 `[E + 1]`. `tops` uint8 `[E, Dout]` changes no result: it says with which exponent a row's
    groups may share one e4m3 scale (`mxfp4.row_tops`), 255 with none. `by_group` changes the order of sums only, which
    here is float32's anyway: with it, each group of 32 columns is to be scaled by itself and `tops` is not used.
    """
    if tops.shape != codes.shape[:2]:
        raise ValueError(f"tops must be {tuple(codes.shape[:2])}, is {tuple(tops.shape)}")
    values = from_mxfp4_order(x).view(torch.float8_e4m3fn).float()
    return (mxfp4_expert_gemm(values, codes, scales, expert_offsets) * x_scales).to(torch.bfloat16)
