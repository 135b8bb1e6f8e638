"""Turns tensors into FP8 with block scales and back, by arithmetic that shares nothing with the product."""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 128


def scales_over(scales: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every element, float64."""
    spread = scales.double().repeat_interleave(SIDE, -2).repeat_interleave(SIDE, -1)
    return spread[..., : shape[-2], : shape[-1]]


def encode_blocks(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn like `weight` [..., N, K] and scales of `dtype`, the largest of a block at most 448 times."""
    rows, columns = (-(-side // SIDE) * SIDE for side in weight.shape[-2:])
    padded = weight.new_zeros(*weight.shape[:-2], rows, columns)
    padded[..., : weight.shape[-2], : weight.shape[-1]] = weight
    blocks = padded.unflatten(-2, (-1, SIDE)).unflatten(-1, (-1, SIDE))
    scales = blocks.abs().amax((-3, -1)).clamp(min=1e-30) / 448
    if dtype == torch.float8_e8m0fnu:
        scales = torch.exp2(scales.log2().ceil())
    # A scale rounded down would push the largest value past 448.
    scales = (scales * 1.01).to(dtype) if dtype == torch.bfloat16 else scales.to(dtype)
    codes = (weight.double() / scales_over(scales.float(), weight.shape)).clamp(-448, 448)
    return codes.float().to(torch.float8_e4m3fn), scales


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 of the exact products: 28 bits fit float64."""
    return (codes.double() * scales_over(scales.float(), codes.shape)).float()
