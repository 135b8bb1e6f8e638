"""Definition of sparse latent attention in plain torch; it does not know who chose the positions."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.packed import sequence_of_token, slots_of_positions
from day0_kernels.row_invariant import bmm
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

TILE_POSITIONS = 64
GROUP_ELEMENTS = 1 << 22


def _attend(
    q: Tensor, latents: Tensor, slots: Tensor, softmax_scale: float, value_dim: int, sinks: Tensor | None
) -> Tensor:
    """`q [N, H, R]` over `latents[slots [N, tiles * 64]]` (-1 ignored) -> float32 `[N, H, value_dim]`.

    Tiles of 64 positions keep every product at one shape; a tile of -1 adds exact zeros, so the width of the call
    cannot change a bit. `sinks [H]` are logits of a value of zeros.
    """
    rows, heads, width = q.shape
    count = slots.shape[1] // TILE_POSITIONS
    ignored = slots < 0
    keys = latents.index_select(0, slots.clamp(min=0).view(-1)).float()
    keys = keys.index_fill_(0, ignored.view(-1).nonzero().view(-1), 0).view(rows * count, TILE_POSITIONS, width)
    spread = q.float()[:, None].expand(rows, count, heads, width).reshape(rows * count, heads, width)
    logits = bmm(spread, keys.transpose(1, 2)).mul_(softmax_scale).view(rows, count, heads, TILE_POSITIONS)
    logits.masked_fill_(ignored.view(rows, count, 1, TILE_POSITIONS), -torch.inf)
    peak = logits.amax((1, 3), keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.float()[None, None, :, None])
    weights = logits.sub_(peak.masked_fill(peak == -torch.inf, 0)).exp_()
    sums = weights.sum(-1)
    parts = bmm(weights.flatten(0, 1), keys[..., :value_dim]).view(rows, count, heads, value_dim)
    total, out = sums[:, 0], parts[:, 0]
    for i in range(1, count):
        total, out = total + sums[:, i], out + parts[:, i]
    if sinks is not None:
        total = total + torch.exp(sinks.float() - peak[:, 0, :, 0])
    return out / total.masked_fill(total == 0, 1)[..., None]


def _slots(topk_indices: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Slots int64 `[N, tiles * 64]`, -1 kept and appended, cut after the last tile that any row uses."""
    ignored = topk_indices < 0
    used = (~ignored).any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 1
    slots = slots_of_positions(topk_indices[:, :width].long().clamp(min=0), block_table, block_size)
    slots = slots.masked_fill(ignored[:, :width], -1)
    return torch.nn.functional.pad(slots, (0, -width % TILE_POSITIONS), value=-1)


def _prefill(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    out = q.new_empty(*q.shape[:2], value_dim)
    sequence = sequence_of_token(cu_seqlens, len(q))
    step = max(1, GROUP_ELEMENTS // (topk_indices.shape[1] * max(q.shape[1], q.shape[2])))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        slots = _slots(topk_indices[part], block_table[sequence[part]], block_size)
        out[part] = _attend(q[part], latents, slots, softmax_scale, value_dim, sinks).to(q.dtype)
    return out


def _decode(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    sinks: Tensor | None,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    slots = _slots(topk_indices, block_table, block_size)
    return _attend(q, latents, slots, softmax_scale, value_dim, sinks).to(q.dtype)


def sparse_mla_prefill(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """Attention of `q [T, H, R]` over the chosen rows of `latents [S, R]` -> `[T, H, value_dim]` in q's dtype.

    `topk_indices` int32 `[T, W]` are positions within the token's own sequence, -1 ignored (a row with none gives
    zeros); `block_table` int32 `[B, max_blocks]`; `cu_seqlens` int32 `[B + 1]`. Keys are whole latent rows, values
    their first `value_dim` columns (the absorbed form of MLA). Causality is the chooser's duty.
    """
    return _prefill(q, latents, topk_indices, block_table, cu_seqlens, None, block_size, softmax_scale, value_dim)


def sparse_mla_decode(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """One query per sequence: `q [B, H, R]`, `topk_indices` int32 `[B, W]` -> `[B, H, value_dim]`."""
    return _decode(q, latents, topk_indices, block_table, None, block_size, softmax_scale, value_dim)


def sparse_mla_sinks_prefill(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """`sparse_mla_prefill` where head h has one logit more, `sinks[h]` (float32 `[H]`, not scaled), of no value."""
    return _prefill(q, latents, topk_indices, block_table, cu_seqlens, sinks, block_size, softmax_scale, value_dim)


def sparse_mla_sinks_decode(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    sinks: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """`sparse_mla_decode` where head h has one logit more, `sinks[h]` (float32 `[H]`, not scaled), of no value."""
    return _decode(q, latents, topk_indices, block_table, sinks, block_size, softmax_scale, value_dim)
