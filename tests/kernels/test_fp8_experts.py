"""Experts through FP8: the bits of the MXFP4 product where FP8 holds the weights, and which experts it cannot hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from day0_kernels import mxfp4
from day0_kernels.comparison import same_bits
from day0_kernels.expert_gemm.reference import expert_gemm
from day0_kernels.fp8_expert_gemm.reference import fp8_expert_gemm
from day0_kernels.mxfp4_expert_gemm.reference import mxfp4_expert_gemm
from day0_kernels.mxfp4_to_fp8.reference import mxfp4_to_fp8

ROWS = [3, 0, 40, 1, 7]


def _packed(lowest: int, span: int, experts: int = 5, rows: int = 200, columns: int = 320) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator).to(torch.uint8)
    shape = (experts, rows, columns // 32)
    return codes, torch.randint(lowest, lowest + span + 1, shape, generator=generator).to(torch.uint8)


def _rows(columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(sum(ROWS), columns, generator=torch.Generator().manual_seed(2)).to(dtype)
    return x, torch.tensor([0, *ROWS]).cumsum(0).int()


def _converted(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    fp8 = torch.full((*codes.shape[:-1], 2 * codes.shape[-1]), 0xAA, dtype=torch.uint8)
    return fp8, mxfp4_to_fp8(codes, scales, fp8)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lowest", "span"), [(112, 14), (120, 0), (0, 14), (1, 3)])
def test_converted_gives_the_bits_of_fused(lowest: int, span: int, dtype: torch.dtype) -> None:
    codes, scales = _packed(lowest, span)
    x, offsets = _rows(320, dtype)
    fused = mxfp4_expert_gemm(x, codes, scales, offsets)
    assert fused.isfinite().all() and fused.abs().amax() > 0
    assert same_bits(fp8_expert_gemm(x, *_converted(codes, scales), offsets), fused)


def test_the_product_has_the_bits_of_the_decoded_one() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(0, 0x7F, (5, 130, 300), generator=generator).to(torch.uint8)
    scales = torch.rand(5, 2, 3, generator=generator) / 1000
    x, offsets = _rows(300)
    wide = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :130, :300]
    decoded = weight.view(torch.float8_e4m3fn).float() * wide
    assert same_bits(fp8_expert_gemm(x, weight, scales, offsets), expert_gemm(x, decoded, offsets))


def test_a_block_that_was_kept_apart_is_nan_and_not_a_wrong_number() -> None:
    codes, scales = _packed(110, 4)
    scales[2, 150, 7] = 140
    x, offsets = _rows(320)
    out = fp8_expert_gemm(x, *_converted(codes, scales), offsets)
    fused = mxfp4_expert_gemm(x, codes, scales, offsets)
    apart = torch.zeros_like(out, dtype=torch.bool)
    apart[3:43, 128:] = True
    assert out[apart].isnan().all()
    assert same_bits(out[~apart], fused[~apart])


# Which experts those are.


def test_lossless_experts_are_those_without_a_block_apart() -> None:
    codes, scales = _packed(100, 14)
    assert mxfp4.lossless_experts(codes, scales).tolist() == [True] * 5
    # Each block of expert 1 spans 15; that of expert 3 alone in its last, smallest block.
    scales[1, 0, 0], scales[1, 1, 0] = 99, 114
    scales[3] = 100
    scales[3, 199, 9], scales[3, 198, 8] = 100, 115
    found = mxfp4.lossless_experts(codes, scales)
    assert found.tolist() == [True, False, True, False, True]
    _, spans = mxfp4_to_fp8(codes, scales, torch.empty(5, 200, 320, dtype=torch.uint8))
    assert sorted({expert for expert, _, _ in mxfp4.exceeding_blocks(spans).tolist()}) == [1, 3]


def test_wide_scales_in_different_blocks_are_lossless() -> None:
    codes, scales = _packed(120, 0)
    scales[0, :128] = 40
    scales[1, :, 4:] = 200
    assert mxfp4.lossless_experts(codes, scales).tolist() == [True] * 5


def test_groups_of_zeros_do_not_keep_an_expert_apart() -> None:
    codes, scales = _packed(120, 0)
    codes[4, 7, 16:32] = 0x80
    scales[4, 7, 1] = 254
    assert mxfp4.lossless_experts(codes, scales).tolist() == [True] * 5
    codes[4, 7, 16] = 0x10
    assert mxfp4.lossless_experts(codes, scales).tolist() == [True, True, True, True, False]
