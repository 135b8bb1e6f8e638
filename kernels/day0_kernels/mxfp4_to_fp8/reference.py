"""Definition of the MXFP4 to FP8 conversion in plain torch; it does not know what the weights are for."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.mxfp4 import (
    FP8_BLOCK,
    GROUP_SIZE,
    LOSSLESS_SPAN,
    SCALE_BIAS,
    VALUES,
    block_spans,
    first_nan_scale,
    scale_values,
    unpack,
)
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

FP8_NAN = 0x7F
LARGEST_SHIFT = 6
# A block scale below this would be a subnormal float32, which some hardware takes for zero.
SMALLEST_SCALE_EXPONENT = -126


def mxfp4_to_fp8(codes: Tensor, scales: Tensor, fp8: Tensor) -> tuple[Tensor, Tensor]:
    """Writes e4m3fn bits into `fp8` uint8 `[E, N, K]`; returns `block_scales` float32 and `spans` int32 per block.

    `codes` uint8 `[E, N, K / 2]`, `scales` uint8 `[E, N, K / 32]`. A block is 128 rows by 128 columns, smaller at the
    edges. Where `spans` is at most 14, fp8 times its block's scale is the MXFP4 value exactly; a block beyond it is all
    NaN, because it could only be rounded. ValueError for a scale byte 255.
    """
    nan = first_nan_scale(scales)
    if nan is not None:
        raise ValueError(f"scales{list(nan)} is 255, which is NaN")
    largest, spans = block_spans(codes, scales)
    exponents = (largest - SCALE_BIAS - LARGEST_SHIFT).clamp(min=SMALLEST_SCALE_EXPONENT)
    values = torch.tensor(VALUES, device=codes.device)
    for expert in range(len(codes)):
        shifts = scales[expert].int() - SCALE_BIAS - _per_group(exponents[expert], scales.shape[1:])
        apart = (_per_group(spans[expert], scales.shape[1:]) > LOSSLESS_SPAN).unsqueeze(-1)
        # Groups of zeros may have any exponent; theirs would overflow the shift.
        factors = torch.exp2(shifts.clamp(-8, LARGEST_SHIFT).float()).unsqueeze(-1)
        groups = values[unpack(codes[expert]).int()].unflatten(-1, (-1, GROUP_SIZE)) * factors
        bits = groups.to(torch.float8_e4m3fn).view(torch.uint8)
        fp8[expert] = bits.masked_fill(apart, FP8_NAN).flatten(-2)
    return scale_values((exponents + SCALE_BIAS).to(torch.uint8)), spans


def _per_group(blocks: Tensor, shape: torch.Size) -> Tensor:
    """A value per block `[ceil(N / 128), ceil(K / 128)]` at every group `[N, K / 32]` of it."""
    per_row = blocks.repeat_interleave(FP8_BLOCK, 0)[: shape[0]]
    return per_row.repeat_interleave(FP8_BLOCK // GROUP_SIZE, 1)[:, : shape[1]]
