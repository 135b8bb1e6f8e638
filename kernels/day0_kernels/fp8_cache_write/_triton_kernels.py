"""Device code of the quantising cache writes."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import bfloat16_of, e4m3_of, float32_of

_SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _quantised(x):
    """Bits uint8 and scales float32 of float32 `[N, W]`, by the row; divisions are the exact ones."""
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    peak = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.div_rn(peak, tl.full(peak.shape, 448.0, tl.float32)), _SMALLEST_SCALE)
    scale = tl.where(broken, float("nan"), scale)
    ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    bits = e4m3_of(ratio).to(tl.uint8, bitcast=True)
    # Of a NaN the conversion may keep the sign.
    return tl.where(ratio != ratio, 0x7F, bits).to(tl.uint8), scale


@triton.jit
def _store_latents(
    latents,
    codes,
    scales,
    tails,
    slot_mapping,
    program,
    T,
    V: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Rows of `BLOCK_T` tokens; `codes`, `scales` and `tails` are the cache as uint8, float32 and bfloat16."""
    ROW: tl.constexpr = V + 4 * GROUPS + 2 * (R - V)
    first = program * BLOCK_T
    part = tl.arange(0, BLOCK_T * GROUPS_PAD)
    token, group = first + part // GROUPS_PAD, part % GROUPS_PAD
    slot = tl.load(slot_mapping + token, mask=token < T, other=-1).to(tl.int64)
    kept = (slot >= 0) & (group < GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = latents + token.to(tl.int64)[:, None] * R + column
    bits, scale = _quantised(float32_of(tl.load(at, mask=kept[:, None], other=0.0)))
    tl.store(codes + slot[:, None] * ROW + column, bits, mask=kept[:, None])
    tl.store(scales + slot * (ROW // 4) + V // 4 + group, scale, mask=kept)
    if R > V:
        token = first + tl.arange(0, BLOCK_T)
        slot = tl.load(slot_mapping + token, mask=token < T, other=-1).to(tl.int64)
        behind = tl.arange(0, TAIL_PAD)
        kept = (slot >= 0)[:, None] & (behind < R - V)[None, :]
        tail = tl.load(latents + token.to(tl.int64)[:, None] * R + V + behind[None, :], mask=kept, other=0.0)
        if tail.dtype != tl.bfloat16:
            tail = bfloat16_of(float32_of(tail))
        tl.store(tails + slot[:, None] * (ROW // 2) + (V // 2 + 2 * GROUPS) + behind[None, :], tail, mask=kept)


@triton.jit
def _store_keys(
    keys,
    codes,
    scales,
    key_slots,
    program,
    T,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Rows of `BLOCK_T` tokens in blocks of `ROWS`; `codes` and `scales` are the cache as uint8 and float32."""
    token = program * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(key_slots + token, mask=token < T, other=-1).to(tl.int64)
    named = slot >= 0
    column = tl.arange(0, D_PAD)
    kept = named[:, None] & (column < D)[None, :]
    at = keys + token.to(tl.int64)[:, None] * D + column[None, :]
    bits, scale = _quantised(float32_of(tl.load(at, mask=kept, other=0.0)))
    # Only a slot that is none is negative, and it writes nothing.
    block, row = slot // ROWS, slot % ROWS
    tl.store(codes + (block * (ROWS * (D + 4)) + row * D)[:, None] + column[None, :], bits, mask=kept)
    tl.store(scales + block * (ROWS * (D + 4) // 4) + ROWS * D // 4 + row, scale, mask=named)


@triton.jit(do_not_specialize=["T", "latent_programs"])
def store_kernel(
    latents,
    codes,
    scales,
    tails,
    slot_mapping,
    keys,
    key_codes,
    key_scales,
    key_slots,
    T,
    latent_programs,
    V: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """The first `latent_programs` programs write latents (none where V is 0), the others index keys."""
    program = tl.program_id(0)
    # Two conditions, not one: a constant takes out the branch whose pointers are None.
    if V > 0:  # noqa: SIM102
        if program < latent_programs:
            _store_latents(
                latents,
                codes,
                scales,
                tails,
                slot_mapping,
                program,
                T,
                V,
                R,
                GROUPS,
                GROUPS_PAD,
                TAIL_PAD,
                BLOCK_T,
            )
    if D > 0:  # noqa: SIM102
        if program >= latent_programs:
            _store_keys(
                keys, key_codes, key_scales, key_slots, program - latent_programs, T, D, D_PAD, ROWS, BLOCK_KEYS
            )
