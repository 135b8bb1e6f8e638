"""Definition of the quantising cache writes in plain torch; it does not know who reads the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

GROUP = 128
LARGEST_E4M3 = 448.0
SMALLEST_SCALE = 2.0**-126
NAN_BITS = 0x7F


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., W]` as bits uint8 of e4m3fn `[..., W]` and one scale float32 `[...]`, so that x is about bits * scale.

    The scale is the largest magnitude / 448, and 2^-126 where that is less (a row of zeros is zeros). A NaN makes its
    row's scale and bits NaN; an infinity makes the scale infinite, itself NaN and finite values zero.
    """
    wide = x.float()
    peak = wide.abs().amax(-1)
    # By a tensor: by a number, torch multiplies by a rounded reciprocal on some devices.
    scale = (peak / torch.full_like(peak, LARGEST_E4M3)).clamp(min=SMALLEST_SCALE)
    scale = scale.masked_fill(scale.isnan(), torch.nan)
    ratio = wide / scale[..., None]
    bits = ratio.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
    return bits.masked_fill(ratio.isnan(), NAN_BITS), scale


def _kept(rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    kept = (slots >= 0).nonzero()[:, 0]
    return rows.index_select(0, kept), slots.index_select(0, kept).long()


def latent_store_fp8(latents: Tensor, latent_cache: Tensor, slot_mapping: Tensor, *, value_dim: int) -> None:
    """Writes `latents [T, R]` to rows `slot_mapping` int32 `[T]` of `latent_cache` uint8; -1 is skipped.

    A row of the cache is value_dim bytes of e4m3fn, one float32 scale for each 128 of them, then R - value_dim
    bfloat16: 656 bytes for 512 + 64 columns, 528 for 512.
    """
    rows, slots = _kept(latents, slot_mapping)
    bits, scales = quantised(rows[:, :value_dim].unflatten(1, (value_dim // GROUP, GROUP)))
    tail = rows[:, value_dim:].to(torch.bfloat16).contiguous()
    latent_cache[slots] = torch.cat((bits.flatten(1), scales.view(torch.uint8), tail.view(torch.uint8)), 1)


def index_key_store_fp8(keys: Tensor, key_cache: Tensor, key_slots: Tensor) -> None:
    """Writes `keys [T, D]` to slots `key_slots` int32 `[T]` of `key_cache` uint8 `[num_blocks, rows * (D + 4)]`.

    Slot s is row `s % rows` of block `s // rows`; -1 is skipped. A block is first all its rows' e4m3fn bytes, then
    their float32 scales.
    """
    width = keys.shape[1]
    rows, slots = _kept(keys, key_slots)
    bits, scales = quantised(rows)
    per_block = key_cache.shape[1] // (width + 4)
    block, row = slots // per_block, slots % per_block
    split = per_block * width
    key_cache[:, :split].unflatten(1, (per_block, width))[block, row] = bits
    key_cache[:, split:].unflatten(1, (per_block, 4))[block, row] = scales[:, None].view(torch.uint8)


def latent_and_key_store_fp8(
    latents: Tensor,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    key_cache: Tensor,
    key_slots: Tensor,
    *,
    value_dim: int,
) -> None:
    """`latent_store_fp8` and `index_key_store_fp8` of the same tokens."""
    latent_store_fp8(latents, latent_cache, slot_mapping, value_dim=value_dim)
    index_key_store_fp8(keys, key_cache, key_slots)
