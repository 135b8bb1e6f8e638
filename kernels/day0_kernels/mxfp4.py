"""MXFP4 in one layout, decoded exactly and encoded by squared error; it knows no checkpoint format and no operator.

A matrix `[..., N, K]` is held as

    codes   uint8 [..., N, K / 2]    two e2m1 codes a byte, the low nibble is the even column
    scales  uint8 [..., N, K / 32]   e8m0: byte b is 2^(b - 127) for 32 consecutive columns; 0 is 2^-127, 255 is NaN

and K is a multiple of 32. (OCP Microscaling Formats 1.0.)
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32
SCALE_BIAS = 127
NAN_SCALE = 255
# Every code times 2^(252 - 127) is a finite float32; 4 times the next power of two is not.
LARGEST_FINITE_SCALE = 252
# Group exponents that one FP8 scale can share without rounding: v * 2^k is exact in e4m3fn for k from -8 to 6.
LOSSLESS_SPAN = 14
FP8_BLOCK = 128
# Group exponents below a row's largest that keep e4m3 bytes of whole multiples normal: v * 2^k for k from -5 to 6.
ROW_SPAN = 11

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))

# Both values of a packed byte side by side, as one integer: a gather then moves 8 bytes for each index.
_PAIRS = torch.tensor([(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)]).view(torch.int64).view(-1)

_CHUNK_ELEMENTS = 1 << 18


def unpack(codes: Tensor) -> Tensor:
    """Codes one a byte, uint8 `[..., K]`, of packed uint8 `[..., K / 2]`."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Packed uint8 `[..., K / 2]` of codes 0 .. 15 one a byte, uint8 `[..., K]`, K even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def scale_values(scales: Tensor) -> Tensor:
    """`2^(b - 127)` as float32 of every byte b of a uint8 tensor; NaN for 255."""
    bits = scales.to(torch.int32) << 23
    bits = bits.masked_fill(scales == 0, 1 << 22)
    bits = bits.masked_fill(scales == NAN_SCALE, 0x7FC00000)
    return bits.view(torch.float32)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values `[..., K]` of packed codes `[..., K / 2]` and scale bytes `[..., K / 32]`.

    Exact in float64 always, and in float32 but for values from 2^128 on, which only the bytes 253 and 254 have and
    which become infinite. A group with byte 255 is NaN.
    """
    pairs = _PAIRS.to(codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
    groups = pairs.view(torch.float32).view(*scales.shape, GROUP_SIZE).to(dtype)
    return groups.mul_(scale_values(scales).to(dtype).unsqueeze(-1)).flatten(-2)


def first_nan_scale(scales: Tensor) -> tuple[int, ...] | None:
    """Index of the first scale byte that is 255, or None."""
    found = (scales == NAN_SCALE).nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes `[..., K / 2]` and scale bytes `[..., K / 32]` of finite values `[..., K]`, K a multiple of 32.

    Each group gets the exponent with the least squared error. With e = floor(log2(largest magnitude)) - 2 only e - 1,
    e and e + 1 can have it: one lower clips the largest value by more than all others gain, and the values of one
    higher that matter are all values of e + 1 too. Equal errors keep e, then e + 1. Values halfway between two codes
    take the even one. A group of zeros has the byte 127. Exponents are kept where every code is a finite float32.

    ValueError for a K that is no multiple of 32 and for a value that is not finite.
    """
    if x.shape[-1] % GROUP_SIZE:
        raise ValueError(f"the last dimension must be a multiple of {GROUP_SIZE}, got {tuple(x.shape)}")
    groups = x.reshape(-1, GROUP_SIZE)
    codes = torch.empty(len(groups), GROUP_SIZE // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(groups), dtype=torch.uint8, device=x.device)
    step = _CHUNK_ELEMENTS // GROUP_SIZE
    for begin in range(0, len(groups), step):
        part = slice(begin, begin + step)
        codes[part], scales[part] = _encode_groups(groups[part].float())
    return codes.view(*x.shape[:-1], -1), scales.view(*x.shape[:-1], -1)


def _encode_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes `[G, 16]` and scale bytes `[G]` of float32 groups `[G, 32]`."""
    magnitudes = groups.abs()
    peak = magnitudes.amax(1)
    if not peak.isfinite().all():
        raise ValueError("a value is not finite")
    # frexp gives a mantissa in [0.5, 1): floor(log2(peak)) is its exponent less one.
    floor = torch.frexp(peak).exponent.int() - 3
    best_codes, best_scales, best_error = _candidate(magnitudes, floor)
    for shift in (1, -1):
        codes, scales, error = _candidate(magnitudes, floor + shift)
        better = error < best_error
        best_codes = torch.where(better[:, None], codes, best_codes)
        best_scales = torch.where(better, scales, best_scales)
        best_error = torch.where(better, error, best_error)
    best_scales = best_scales.masked_fill(peak == 0, SCALE_BIAS)
    return pack(best_codes | (torch.signbit(groups).to(torch.uint8) << 3)), best_scales


def _candidate(magnitudes: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes without sign uint8 `[G, 32]`, scale bytes `[G]` and squared errors float64 `[G]` under an exponent."""
    scales = (exponent + SCALE_BIAS).clamp(0, LARGEST_FINITE_SCALE).to(torch.uint8)
    unit = scale_values(scales)[:, None]
    # A power of two: the quotient is exact, or so small that its code is 0 anyway.
    scaled = magnitudes / unit
    codes = (scaled > 0.25).to(torch.uint8)
    for bound, even_above in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += scaled >= bound if even_above else scaled > bound
    value = torch.tensor(_MAGNITUDES, device=codes.device)[codes.to(torch.int32)]
    error = (scaled - value).double().square().sum(1) * unit[:, 0].double().square()
    return codes, scales, error


def block_spans(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Largest group exponent plus 127, and exponent span, int32 `[..., ceil(N / 128), ceil(K / 128)]` of each block.

    `codes [..., N, K / 2]`, `scales [..., N, K / 32]`. Groups whose codes are all zero count nothing: they are zero
    under any exponent. A block of such groups has the exponent 127 (2^0) and the span 0.
    """
    held = ((codes.unflatten(-1, (-1, GROUP_SIZE // 2)) & 0x77) != 0).any(-1)
    wide = scales.to(torch.int32)
    largest = _over_blocks(wide.masked_fill(~held, -1))
    smallest = -_over_blocks((-wide).masked_fill(~held, -NAN_SCALE - 1))
    empty = largest < 0
    return largest.masked_fill(empty, SCALE_BIAS), (largest - smallest).masked_fill(empty, 0)


def _over_blocks(per_group: Tensor) -> Tensor:
    """Largest of `[..., N, K / 32]` in each block of 128 rows and 4 groups; blocks at the edges may be smaller."""
    rows, groups = per_group.shape[-2:]
    wide = FP8_BLOCK // GROUP_SIZE
    lowest = torch.iinfo(per_group.dtype).min
    padding = (0, -groups % wide, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(per_group, padding, value=lowest)
    return padded.unflatten(-1, (-1, wide)).unflatten(-3, (-1, FP8_BLOCK)).amax((-1, -3))


def exceeding_blocks(spans: Tensor) -> Tensor:
    """Indices int64 `[X, 3]` (expert, row block, column block) of the blocks one FP8 scale cannot hold exactly.

    `spans` int32 `[E, ceil(N / 128), ceil(K / 128)]` as `mxfp4_to_fp8` returns them. Those blocks stay MXFP4.
    """
    return (spans > LOSSLESS_SPAN).nonzero()


def lossless_experts(codes: Tensor, scales: Tensor) -> Tensor:
    """Whether `mxfp4_to_fp8` is exact for every block of an expert, bool `[E]` on the CPU.

    `codes` uint8 `[E, N, K / 2]`, `scales` uint8 `[E, N, K / 32]`. One expert at a time, so that little memory is
    taken; its codes are read only where scale bytes alone do not settle it, since groups of zeros count nothing.
    """
    lossless = torch.empty(len(scales), dtype=torch.bool)
    for expert, bytes_of_expert in enumerate(scales):
        wide = bytes_of_expert.to(torch.int32)
        bound = _over_blocks(wide) + _over_blocks(-wide)
        if (bound > LOSSLESS_SPAN).any():
            bound = block_spans(codes[expert], bytes_of_expert)[1]
        lossless[expert] = bool((bound <= LOSSLESS_SPAN).all())
    return lossless


def row_tops(codes: Tensor, scales: Tensor) -> Tensor:
    """Largest scale byte of each row uint8 `[E, N]`, or 255 where the others go more than `ROW_SPAN` below it.

    `codes` uint8 `[E, N, K / 2]`, `scales` uint8 `[E, N, K / 32]`. Groups whose codes are all zero count nothing; a row
    of such groups has 0. A row that holds the byte 255 has 255. One expert at a time, so that little memory is taken.
    """
    tops = scales.new_empty(scales.shape[:2])
    for expert, wide in enumerate(scales.to(torch.int16)):
        held = ((codes[expert].unflatten(-1, (-1, GROUP_SIZE // 2)) & 0x77) != 0).any(-1)
        top = wide.masked_fill(~held, 0).amax(-1)
        least = wide.masked_fill(~held, NAN_SCALE).amin(-1)
        apart = (top - least > ROW_SPAN) | (wide == NAN_SCALE).any(-1)
        tops[expert] = top.masked_fill(apart, NAN_SCALE).to(torch.uint8)
    return tops
