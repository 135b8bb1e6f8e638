"""The short convolution over packed tokens, its carried inputs, and one step of it; it knows no shape beforehand."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_packed import sequence_of_part
from day0_kernels.triton_rounding import float32_of, rounded_to


@triton.jit
def _activated(x, SILU: tl.constexpr):
    if SILU:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit(do_not_specialize=["sequences"])
def convolve_tokens(
    x,
    weight,
    state_slots,
    cu_seqlens,
    out,
    sequences,
    x_row,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program (part of BLOCK_T tokens, channels): `out [T, C]` of the tokens whose inputs are all in the call.

    The first TAPS - 1 of a sequence are `convolve_heads`' work. Padding sequences are zeros here.
    """
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    channel = ((program % TILES) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    sequence, begin, end, first = sequence_of_part(cu_seqlens, sequences, program // TILES, BLOCK_T)
    if first < end:
        # Rows count from the first token of the part, so that offsets within it are small.
        row = tl.arange(0, BLOCK_T)[:, None]
        inside = (row < end - first) & (channel < C)
        out_at = out + first.to(tl.int64) * C + (row * C + channel)
        if tl.load(state_slots + sequence) < 0:
            tl.store(out_at, tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty), mask=inside)
        else:
            inside &= row >= begin - first + (TAPS - 1)
            x_at = x + first.to(tl.int64) * x_row + channel
            total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
            for tap in tl.static_range(TAPS):
                value = float32_of(tl.load(x_at + (row - (TAPS - 1 - tap)) * x_row, mask=inside, other=0.0))
                total += value * float32_of(tl.load(weight + channel * TAPS + tap, mask=channel < C, other=0.0))
            tl.store(out_at, rounded_to(_activated(total, SILU), out.dtype.element_ty), mask=inside)


@triton.jit
def convolve_heads(
    x,
    weight,
    conv_state,
    state_slots,
    cu_seqlens,
    out,
    x_row,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program (sequence, channels): the first TAPS - 1 tokens, which need carried inputs, and then the new state."""
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    channel = (program % TILES) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    begin = tl.load(cu_seqlens + program // TILES).to(tl.int64)
    length = tl.load(cu_seqlens + program // TILES + 1) - begin
    slot = tl.load(state_slots + program // TILES).to(tl.int64)
    if (slot >= 0) & (length > 0):
        held_at = conv_state + (slot * C + channel) * (TAPS - 1)
        x_at = x + begin * x_row + channel
        for token in tl.static_range(TAPS - 1):
            total = tl.zeros([BLOCK_C], tl.float32)
            for tap in tl.static_range(TAPS):
                place = token + tap
                if place < TAPS - 1:
                    value = float32_of(tl.load(held_at + place, mask=inside, other=0.0))
                else:
                    newer = place - (TAPS - 1)
                    value = float32_of(tl.load(x_at + newer * x_row, mask=inside & (newer < length), other=0.0))
                total += value * float32_of(tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0))
            made = rounded_to(_activated(total, SILU), out.dtype.element_ty)
            tl.store(out + (begin + token) * C + channel, made, mask=inside & (token < length))
        # Ascending: an input that stays comes from a later place, which is not written yet. A channel is one thread's.
        for place in tl.static_range(TAPS - 1):
            source = length - (TAPS - 1) + place
            new = tl.load(x_at + source * x_row, mask=inside & (source >= 0), other=0.0)
            old = tl.load(held_at + (source + TAPS - 1), mask=inside & (source < 0), other=0.0)
            if not SAME:
                new = rounded_to(float32_of(new), conv_state.dtype.element_ty)
            tl.store(held_at + place, tl.where(source >= 0, new, old), mask=inside)


@triton.jit
def convolve_step(
    x,
    weight,
    conv_state,
    state_slots,
    out,
    x_row,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program (sequence, channels): one token; the state moves up by one input in place."""
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    row = (program // TILES).to(tl.int64)
    channel = (program % TILES) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    slot = tl.load(state_slots + row).to(tl.int64)
    out_at = out + row * C + channel
    if slot < 0:
        tl.store(out_at, tl.zeros([BLOCK_C], out.dtype.element_ty), mask=inside)
    else:
        held_at = conv_state + (slot * C + channel) * (TAPS - 1)
        total = tl.zeros([BLOCK_C], tl.float32)
        newest = tl.load(x + row * x_row + channel, mask=inside, other=0.0)
        for tap in tl.static_range(TAPS - 1):
            held = tl.load(held_at + tap, mask=inside, other=0.0)
            factor = float32_of(tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0))
            total += float32_of(held) * factor
            if tap > 0:
                tl.store(held_at + (tap - 1), held, mask=inside)
        factor = float32_of(tl.load(weight + channel * TAPS + (TAPS - 1), mask=inside, other=0.0))
        total += float32_of(newest) * factor
        if not SAME:
            newest = rounded_to(float32_of(newest), conv_state.dtype.element_ty)
        if TAPS > 1:
            tl.store(held_at + (TAPS - 2), newest, mask=inside)
        tl.store(out_at, rounded_to(_activated(total, SILU), out.dtype.element_ty), mask=inside)
