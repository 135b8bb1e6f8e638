"""MXFP4 against exact arithmetic: every code under every scale byte, every exponent span, the encoder's choice."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from day0_kernels import mxfp4
from day0_kernels.comparison import same_bits
from day0_kernels.expert_gemm.reference import expert_gemm
from day0_kernels.mxfp4_expert_gemm.reference import mxfp4_expert_gemm
from day0_kernels.mxfp4_to_fp8.reference import mxfp4_to_fp8

DATA = Path(__file__).resolve().parents[1] / "data"
MAGNITUDES = [Fraction(m) for m in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
LARGEST_FLOAT32 = Fraction(torch.finfo(torch.float32).max)


def _exact(code: int, byte: int) -> Fraction:
    return MAGNITUDES[code & 7] * (-1 if code & 8 else 1) * Fraction(2) ** (byte - 127)


def _all_codes() -> tuple[Tensor, Tensor]:
    """Codes `[256, 16]`, every code twice, and scales `[256, 1]`, every byte."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    return mxfp4.pack(codes.expand(256, 32)), torch.arange(256, dtype=torch.uint8)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_codes_under_all_scale_bytes(dtype: torch.dtype) -> None:
    codes, scales = _all_codes()
    decoded = mxfp4.decode(codes, scales, dtype)
    assert decoded.dtype == dtype
    beyond = 0
    for byte, row in enumerate(decoded.tolist()):
        for k, value in enumerate(row):
            if byte == 255:
                assert value != value
                continue
            exact = _exact(k % 16, byte)
            if dtype == torch.float32 and abs(exact) > LARGEST_FLOAT32:
                assert byte >= 253 and value == (torch.inf if exact > 0 else -torch.inf)
                beyond += 1
            else:
                assert Fraction(value) == exact
                assert (torch.signbit(torch.tensor(value)).item()) is (k % 16 >= 8)
    # Of both signs, each code twice: 4 and 6 under byte 253, 2, 3, 4 and 6 under 254.
    assert beyond == (24 if dtype == torch.float32 else 0)


def test_the_published_block() -> None:
    """Low nibble first: 0, .5, 1, 1.5, ...; byte 0 is 2^-127, not 0."""
    block = torch.frombuffer(bytearray((DATA / "mxfp4_block.bin").read_bytes()), dtype=torch.uint8)
    expected = json.loads((DATA / "mxfp4_expected.json").read_text())
    assert block.tolist() == expected["block"]

    def scale(byte: int) -> Tensor:
        return torch.tensor([byte], dtype=torch.uint8)

    want = torch.tensor(expected["values_scale127"])
    assert same_bits(mxfp4.decode(block, scale(127)), want)
    assert same_bits(mxfp4.decode(block, scale(0)), want * expected["scale0_is"])
    assert float(mxfp4.decode(block, scale(0))[1]) == expected["scale0_is"] / 2 > 0
    assert mxfp4.decode(block, scale(255)).isnan().all()


def test_pack_and_unpack_are_inverse() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    assert mxfp4.unpack(packed)[2 * 0x21 : 2 * 0x21 + 2].tolist() == [1, 2]
    assert torch.equal(mxfp4.pack(mxfp4.unpack(packed)), packed)


# To FP8.


def _convert(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values times their block's scale, float64 `[E, N, K]`; spans; block scales."""
    fp8 = torch.full((*codes.shape[:-1], codes.shape[-1] * 2), 0xAA, dtype=torch.uint8)
    block_scales, spans = mxfp4_to_fp8(codes, scales, fp8)
    wide = block_scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return fp8.view(torch.float8_e4m3fn).double() * wide[:, : fp8.shape[1], : fp8.shape[2]], spans, block_scales


@pytest.mark.parametrize("lowest", [0, 1, 100, 127, 234])
@pytest.mark.parametrize("span", range(21))
def test_every_span_is_reported_and_exact_up_to_14(span: int, lowest: int) -> None:
    """All 16 codes under both ends and a middle exponent of the block."""
    codes = mxfp4.pack((torch.arange(32, dtype=torch.uint8) % 16).expand(1, 3, 32))
    scales = torch.tensor([lowest + span, lowest + span // 2, lowest], dtype=torch.uint8).view(1, 3, 1)
    values, spans, block_scales = _convert(codes, scales)
    assert spans.tolist() == [[[span]]]
    assert mxfp4.exceeding_blocks(spans).tolist() == ([[0, 0, 0]] if span > 14 else [])
    if span > 14:
        assert values.isnan().all()
    else:
        assert same_bits(values, mxfp4.decode(codes, scales, torch.float64))
    mantissa, _ = torch.frexp(block_scales)
    assert (mantissa == 0.5).all() and (block_scales >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("byte", range(255))
def test_every_scale_byte_converts_exactly(byte: int) -> None:
    codes, _ = _all_codes()
    codes, scales = codes[None, :1], torch.tensor([[[byte]]], dtype=torch.uint8)
    values, spans, _ = _convert(codes, scales)
    assert spans.item() == 0
    assert same_bits(values, mxfp4.decode(codes, scales, torch.float64))


def test_a_block_beyond_is_kept_apart_from_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 200, 160), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 125, (3, 200, 10), generator=generator).to(torch.uint8)
    scales[1, 130, 5] = 90
    scales[2, 0, 0] = 139
    values, spans, _ = _convert(codes, scales)
    assert mxfp4.exceeding_blocks(spans).tolist() == [[1, 1, 1], [2, 0, 0]]
    assert (spans[1, 1, 1].item(), spans[2, 0, 0].item()) == (34, 29)
    want = mxfp4.decode(codes, scales, torch.float64)
    apart = torch.zeros_like(want, dtype=torch.bool)
    apart[1, 128:, 128:256] = True
    apart[2, :128, :128] = True
    assert values[apart].isnan().all()
    assert same_bits(values[~apart], want[~apart])


def test_groups_of_zeros_do_not_widen_a_span() -> None:
    codes = torch.full((1, 2, 32), 0x31, dtype=torch.uint8)
    codes[0, 1, 16:] = 0x80
    scales = torch.tensor([[[120, 121], [122, 0]]], dtype=torch.uint8)
    values, spans, _ = _convert(codes, scales)
    assert spans.item() == 2
    assert same_bits(values, mxfp4.decode(codes, scales, torch.float64))
    scales = torch.tensor([[[1, 0], [2, 254]]], dtype=torch.uint8)
    values, spans, _ = _convert(codes, scales)
    assert spans.item() == 2
    assert same_bits(values, mxfp4.decode(codes, scales, torch.float64))
    values, spans, block_scales = _convert(torch.full_like(codes, 0x08), scales)
    assert (spans.item(), block_scales.item()) == (0, 2.0**-6)
    assert (values == 0).all() and torch.signbit(values[0, 0, 0]) and not torch.signbit(values[0, 0, 1])


def test_the_scale_byte_255_is_refused_with_its_place() -> None:
    codes, scales = torch.zeros(2, 3, 48, dtype=torch.uint8), torch.full((2, 3, 3), 127, dtype=torch.uint8)
    scales[1, 2, 0] = 255
    with pytest.raises(ValueError, match=r"scales\[1, 2, 0\] is 255, which is NaN"):
        _convert(codes, scales)
    assert mxfp4.first_nan_scale(scales) == (1, 2, 0)
    assert mxfp4.first_nan_scale(scales[:1]) is None


# The product.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_has_the_bits_of_the_decoded_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [3, 0, 40, 1, 7]
    x = torch.randn(sum(rows), 320, generator=generator).to(dtype)
    codes = torch.randint(0, 256, (5, 48, 160), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 124, (5, 48, 10), generator=generator).to(torch.uint8)
    offsets = torch.tensor([0, *rows]).cumsum(0).int()
    out = mxfp4_expert_gemm(x, codes, scales, offsets)
    assert same_bits(out, expert_gemm(x, mxfp4.decode(codes, scales), offsets))
    scales[2, 5, 7] = 255
    poisoned = mxfp4_expert_gemm(x, codes, scales, offsets).isnan()
    assert poisoned.nonzero().tolist() == [[row, 5] for row in range(3, 43)]


# Encoding.


def _groups(seed: int = 0) -> Tensor:
    """Groups `[G, 32]` of many shapes: normal, outliers, one value, powers, halves between codes, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(400, 32, generator=generator)
    outlier = normal[:100].clone()
    outlier[:, 3] *= 40
    flat = torch.full((1, 32), 0.25)
    flat[0, 0] = 4
    halves = torch.randint(-32, 33, (200, 32), generator=generator) / 4
    wide = normal[:100] * torch.exp2(torch.randint(-120, 120, (100, 1), generator=generator).float())
    tiny = torch.randint(-9, 10, (50, 32), generator=generator) * 2.0**-149
    one = torch.zeros(60, 32)
    one[torch.arange(60), torch.arange(60) % 32] = torch.linspace(-9, 9, 60)
    return torch.cat([normal, outlier, flat, halves, wide, tiny, one, torch.zeros(1, 32), -torch.zeros(1, 32)])


def _error(x: Tensor, byte: Tensor | int) -> Tensor:
    """Squared error float64 `[G]` of the nearest codes under a scale byte, codes found by trying all."""
    unit = torch.exp2(torch.as_tensor(byte).double() - 127).reshape(-1, 1, 1)
    grid = torch.tensor(mxfp4.VALUES, dtype=torch.float64) * unit
    return (x.double().unsqueeze(-1) - grid).abs().amin(-1).square().sum(-1)


def test_no_exponent_has_a_smaller_error() -> None:
    x = _groups()
    codes, scales = mxfp4.encode(x)
    mine = (mxfp4.decode(codes, scales, torch.float64) - x.double()).square().sum(-1)
    assert torch.allclose(mine, _error(x, scales[:, 0]), rtol=1e-12, atol=0)
    best = torch.stack([_error(x, byte) for byte in range(253)]).amin(0)
    assert (mine <= best * (1 + 1e-6)).all()
    # Each of the three candidates is the only best one somewhere.
    floor = torch.frexp(x.abs().amax(-1)).exponent + 127 - 3
    assert {-1, 0, 1} <= set((scales[:, 0].int() - floor).tolist())


def test_a_tie_of_codes_takes_the_even_one() -> None:
    bounds = [(low + high) / 2 for low, high in pairwise(mxfp4.VALUES[:8])]
    x = torch.tensor([6.0, *bounds, *(-bound for bound in bounds), *(0.0 for _ in range(17))])
    codes, scales = mxfp4.encode(x)
    assert scales.item() == 127
    assert mxfp4.unpack(codes)[1:15].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]


def test_mxfp4_values_come_back() -> None:
    """Encoding what was decoded changes no value, whatever exponent a tie takes; zeros keep their signs."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (253, 64, 16), generator=generator).to(torch.uint8)
    scales = torch.arange(253, dtype=torch.uint8).view(253, 1, 1).expand(253, 64, 1)
    decoded = mxfp4.decode(codes, scales)
    assert same_bits(mxfp4.decode(*mxfp4.encode(decoded)), decoded)
    again = mxfp4.encode(mxfp4.decode(*mxfp4.encode(decoded)))
    assert all(torch.equal(a, b) for a, b in zip(again, mxfp4.encode(decoded), strict=True))


def test_zeros_and_the_ends_of_float32() -> None:
    codes, scales = mxfp4.encode(torch.zeros(2, 64))
    assert not codes.any() and (scales == 127).all()
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    codes, scales = mxfp4.encode(torch.cat([largest, -largest]))
    assert scales.flatten().tolist() == [252, 252]
    assert mxfp4.decode(codes, scales).isfinite().all()
    smallest = torch.full((1, 32), 2.0**-128)
    assert same_bits(mxfp4.decode(*mxfp4.encode(smallest)), smallest)


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a multiple of 32, got \(2, 40\)"):
        mxfp4.encode(torch.zeros(2, 40))
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(3, 32)
        x[1, 4] = bad
        with pytest.raises(ValueError, match="a value is not finite"):
            mxfp4.encode(x)


def test_a_long_tensor_is_encoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _groups(3).view(-1, 32)
    whole = mxfp4.encode(x)
    monkeypatch.setattr(mxfp4, "_CHUNK_ELEMENTS", 96)
    assert all(torch.equal(a, b) for a, b in zip(mxfp4.encode(x), whole, strict=True))
