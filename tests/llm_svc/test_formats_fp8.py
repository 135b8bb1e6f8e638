"""FP8 weights with block scales: their values against exact arithmetic, and what is refused by name."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from day0_kernels.comparison import same_bits
from llm_svc.formats.format_error import FormatError
from llm_svc.formats.fp8 import dequantize, find_scaled, refuse_stray_scales
from svc_common.safetensors_header import TensorSpan
from tests.llm_svc.fp8 import decode_blocks, encode_blocks

NAMES = ("a.weight", "a.weight_scale_inv")
CODES = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)


def value_of(byte: int) -> Fraction:
    """OCP 8-bit floating point, e4m3: bias 7, no infinities."""
    sign, exponent, fraction = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * Fraction(fraction, 8) * Fraction(2) ** -6
    return sign * (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 0.1, 1 / 3, 20.25])
def test_all_codes_equal_exact_arithmetic(scale: float, dtype: torch.dtype) -> None:
    """Two blocks side by side, the second with another scale; rows are alike."""
    scales = torch.tensor([[scale, 7 * scale]])
    found = dequantize(NAMES, CODES.repeat(3, 1), scales, dtype)
    columns = enumerate(CODES.view(torch.uint8).tolist())
    products = [value_of(byte) * Fraction(scales[0, column // 128].item()) for column, byte in columns]
    # A fraction to float is correctly rounded to 53 bits, which hold these products exactly.
    assert all(Fraction(float(product)) == product for product in products)
    expected = torch.tensor([float(product) for product in products], dtype=torch.float64).float().to(dtype)
    # The sign of a zero is its code's, which no fraction knows.
    expected = torch.copysign(expected, CODES.float().to(dtype))
    assert same_bits(found, expected.repeat(3, 1))


def test_every_scale_byte_of_e8m0() -> None:
    for byte in range(255):
        scales = torch.tensor([[byte, byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        small = CODES.view(1, -1) if byte < 240 else CODES[:8].view(1, -1)
        found = dequantize(NAMES, small, scales, torch.float32)[0]
        exact = [value_of(int(code)) * Fraction(2) ** (byte - 127) for code in small.view(torch.uint8)[0]]
        assert found.tolist() == torch.tensor([float(one) for one in exact], dtype=torch.float64).float().tolist(), byte


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 257), (3, 130, 260), (2, 2, 5, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_at_the_edges(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    codes, scales = encode_blocks(weight, dtype)
    assert same_bits(dequantize(NAMES, codes, scales, torch.float32), decode_blocks(codes, scales))
    assert (decode_blocks(codes, scales) - weight).abs().max() < 0.3


def test_no_rows_and_no_matrices() -> None:
    for shape, blocks in (((0, 128), (0, 1)), ((0, 4, 4), (0, 1, 1))):
        codes = torch.empty(shape).to(torch.float8_e4m3fn)
        assert dequantize(NAMES, codes, torch.empty(blocks), torch.float32).shape == shape


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 129, 259), (1, 3, 130)])
def test_a_code_that_is_not_a_number_is_named(byte: int, place: tuple[int, ...]) -> None:
    codes, scales = encode_blocks(torch.randn(2, 130, 260))
    codes.view(torch.uint8)[place] = byte
    with pytest.raises(FormatError, match=rf"a\.weight: code \[{', '.join(map(str, place))}\] is 0x{byte:02X}, which"):
        dequantize(NAMES, codes, scales, torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_a_scale_that_cannot_be_one_is_named(bad: float) -> None:
    codes, scales = encode_blocks(torch.randn(130, 260))
    scales[1, 2] = bad
    with pytest.raises(FormatError, match=r"a\.weight_scale_inv: scale \[1, 2\] is .*, must be finite"):
        dequantize(NAMES, codes, scales, torch.float32)
    e8m0 = torch.tensor([[127, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(FormatError, match=r"a\.weight_scale_inv: scale \[0, 1\] is nan"):
        dequantize(NAMES, codes[:128, :200].contiguous(), e8m0, torch.float32)


def test_a_value_beyond_the_dtype_is_named() -> None:
    codes = torch.tensor([[1.0, 100.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1000.0]])
    with pytest.raises(FormatError, match=r"a\.weight: value \[0, 1\] is beyond float16"):
        dequantize(NAMES, codes, scales, torch.float16)
    assert dequantize(NAMES, codes[:, :1].contiguous(), scales, torch.float16).tolist() == [[1000.0]]


def spans(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorSpan]:
    named = {name.replace("__", "."): entry for name, entry in tensors.items()}
    return {name: TensorSpan(name, dtype, shape, 0, 0) for name, (dtype, shape) in named.items()}


WEIGHT = ("F8_E4M3", (300, 129))
BLOCKS = (3, 2)


@pytest.mark.parametrize(
    ("weight", "scale", "dtype"),
    [
        ("a__weight", "a__weight_scale_inv", "F32"),
        ("a__weight", "a__weight_scale_inv", "F8_E8M0"),
        ("a__weight", "a__scale", "F8_E8M0"),
        ("a__weight", "a__weight_scale", "BF16"),
        ("experts__down_proj", "experts__down_proj_scale_inv", "F32"),
    ],
)
def test_pairs_are_found(weight: str, scale: str, dtype: str) -> None:
    found = spans(**{weight: WEIGHT, scale: (dtype, BLOCKS), "b__weight": ("BF16", (3, 4)), "hc__scale": ("F32", (3,))})
    names = (weight.replace("__", "."), scale.replace("__", "."))
    assert find_scaled(found) == dict([names])
    refuse_stray_scales(found, set(names))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"a__weight": WEIGHT},
            r"a\.weight: F8_E4M3 needs one tensor of scales, and none is called a\.weight_scale_inv or a\.weight_scale "
            r"or a\.scale",
        ),
        (
            {"a__weight": WEIGHT, "a__scale": ("F32", BLOCKS), "a__weight_scale_inv": ("F32", BLOCKS)},
            r"a\.weight: .* and two of them: a\.weight_scale_inv, a\.scale",
        ),
        (
            {"a__weight": WEIGHT, "a__weight_scale_inv": ("F32", (2, 2))},
            r"a\.weight_scale_inv: shape \[2, 2\], a\.weight of \[300, 129\] in blocks of 128x128 needs \[3, 2\]",
        ),
        ({"a__weight": WEIGHT, "a__weight_scale_inv": ("F32", ())}, r"a\.weight_scale_inv: shape \[\],"),
        ({"a__weight": WEIGHT, "a__weight_scale_inv": ("F32", (1,))}, r"a\.weight_scale_inv: shape \[1\],"),
        (
            {"a__weight": ("F8_E4M3", (4, 300, 129)), "a__weight_scale_inv": ("F32", BLOCKS)},
            r"a\.weight_scale_inv: shape \[3, 2\], .*needs \[4, 3, 2\]",
        ),
        (
            {"a__weight": WEIGHT, "a__weight_scale_inv": ("U8", BLOCKS)},
            r"a\.weight_scale_inv: dtype U8, must be one of F32, BF16, F8_E8M0",
        ),
        ({"a__weight": ("F8_E4M3", (3,)), "a__weight_scale_inv": ("F32", (1,))}, r"a\.weight: shape \[3\] is no matr"),
        ({"a__weight": ("F8_E5M2", (3, 4))}, r"a\.weight: dtype F8_E5M2; of FP8 weights only F8_E4M3 is served"),
    ],
)
def test_pairs_that_are_none_are_refused(tensors: dict[str, tuple[str, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        find_scaled(spans(**tensors))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a__weight_scale_inv": ("F32", BLOCKS)}, r"a\.weight_scale_inv: scales without F8_E4M3 .* there is no a\.we"),
        (
            {"a__weight": ("BF16", (300, 129)), "a__weight_scale_inv": ("F32", BLOCKS)},
            r"a\.weight_scale_inv: scales without F8_E4M3 weights: a\.weight is BF16",
        ),
        ({"a__weight_scale": ("BF16", BLOCKS)}, r"a\.weight_scale: scales without .* there is no a\.weight"),
        ({"a__scale": ("F8_E8M0", BLOCKS)}, r"a\.scale: scales without .* there is no a\.weight"),
    ],
)
def test_scales_without_weights_are_refused(tensors: dict[str, tuple[str, tuple[int, ...]]], message: str) -> None:
    found = spans(**tensors)
    assert find_scaled(found) == {}
    with pytest.raises(FormatError, match=message):
        refuse_stray_scales(found, set())


def test_codes_are_let_alone() -> None:
    codes, scales = encode_blocks(torch.randn(130, 5))
    before: Tensor = codes.view(torch.uint8).clone()
    dequantize(NAMES, codes, scales, torch.bfloat16)
    assert torch.equal(codes.view(torch.uint8), before)
