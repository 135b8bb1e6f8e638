"""Every code through the helpers Triton kernels round and decode with, against torch, on a GPU or interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from day0_kernels.mxfp4 import VALUES
from day0_kernels.triton_mxfp4 import e4m3_codes, e4m3_words, magnitude_table
from day0_kernels.triton_rounding import bfloat16_of, e4m3_bits_of, e4m3_of, float32_of


@triton.jit
def _float32_kernel(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, float32_of(tl.load(x + at)))


@triton.jit
def _bfloat16_kernel(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, bfloat16_of(tl.load(x + at)))


@triton.jit
def _e4m3_kernel(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, e4m3_of(tl.load(x + at)).to(tl.uint8, bitcast=True))


@triton.jit
def _e4m3_bits_kernel(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, e4m3_bits_of(tl.load(x + at)))


@triton.jit
def _codes_kernel(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low, high = e4m3_codes(tl.load(x + at))
    tl.store(out + 2 * at, low)
    tl.store(out + 2 * at + 1, high)


@triton.jit
def _words_kernel(words, shifts, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low, high = magnitude_table(tl.load(shifts + at))
    first, last = e4m3_words(tl.load(words + at), low, high)
    tl.store(out + 2 * at, first)
    tl.store(out + 2 * at + 1, last)


# Elements of a program: a compiler takes minutes over what an interpreter does at once.
_MOST_AT_ONCE = 1024


def _run(kernel: Any, out: Tensor, *arguments: Tensor) -> Tensor:
    count = len(arguments[0])
    size = min(count, _MOST_AT_ONCE)
    assert count % size == 0, count
    kernel[(count // size,)](*arguments, out, SIZE=size)
    return out


def _around(bits: Tensor, step: int) -> Tensor:
    """Float32 at `bits` (int64), halfway to `bits + step`, and one unit in the last place to each side of halfway."""
    half = bits + step // 2
    wide = torch.cat((bits, half - 1, half, half + 1))
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32).view(torch.float32)


def _same(got: Tensor, want: Tensor) -> bool:
    """Bits, but that any NaN is as good as another."""
    if not got.dtype.is_floating_point:
        return torch.equal(got, want)
    return bool(
        ((got.double() == want.double()) & (got.signbit() == want.signbit()) | got.isnan() & want.isnan()).all()
    )


def widening(device: str) -> bool:
    codes = torch.arange(1 << 16, device=device).to(torch.int16).view(torch.bfloat16)
    return _same(_run(_float32_kernel, torch.empty(1 << 16, device=device), codes), codes.float())


def to_bfloat16(device: str) -> bool:
    x = _around(torch.arange(1 << 16) << 16, 1 << 16).to(device)
    got = _run(_bfloat16_kernel, torch.empty(len(x), device=device, dtype=torch.bfloat16), x)
    return _same(got, x.to(torch.bfloat16))


def to_e4m3(device: str) -> bool:
    # Every bfloat16 is more than every e4m3 code and all places halfway between two.
    x = torch.cat((_around(torch.arange(1 << 16) << 16, 1 << 16), _around(torch.arange(1 << 12) << 20, 1 << 20)))
    x = x.to(device)
    wanted = torch.where(x.abs() > 448, x.sign() * 448, x).to(torch.float8_e4m3fn)
    for kernel in (_e4m3_kernel, _e4m3_bits_kernel):
        got = _run(kernel, torch.empty(len(x), device=device, dtype=torch.uint8), x).view(torch.float8_e4m3fn)
        if not _same(got.float(), wanted.float()):
            return False
    return True


def codes_of_bytes(device: str) -> bool:
    packed = torch.arange(256, device=device).to(torch.uint8)
    got = _run(_codes_kernel, torch.empty(512, device=device, dtype=torch.uint8), packed)
    values = torch.tensor(VALUES, device=device)
    want = values[torch.stack((packed & 15, packed >> 4), 1).flatten().int()] * 2.0**-6
    return _same(got.view(torch.float8_e4m3fn).float(), want)


def words_under_shifts(device: str) -> bool:
    """Every byte at every place of a word, under every shift."""
    bytes_ = torch.arange(256).repeat_interleave(4)
    words = (bytes_ << (8 * (torch.arange(1024) % 4))).repeat(16)
    shifts = torch.arange(-2, 14).clamp(max=12).repeat_interleave(1024)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    got = torch.empty(2 * len(words), device=device, dtype=torch.int32)
    _run(_words_kernel, got, words.to(device), shifts.to(torch.int32).to(device))
    codes = torch.stack([(words.long() >> (4 * i)) & 15 for i in range(8)], 1)
    want = torch.tensor(VALUES)[codes] * torch.exp2(shifts.float() - 6)[:, None]
    return _same(got.cpu().view(torch.float8_e4m3fn).float().view(-1, 8), want)


PROOFS: dict[str, Callable[[str], bool]] = {
    proof.__name__: proof for proof in (widening, to_bfloat16, to_e4m3, codes_of_bytes, words_under_shifts)
}
