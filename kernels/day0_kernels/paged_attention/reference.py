"""Definition of decode attention over whole paged sequences in plain torch; it does not know how a cache was filled."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.packed import slots_of_positions
from day0_kernels.row_invariant import bmm
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

TILE_POSITIONS = 64


def _attend(q: Tensor, keys: Tensor, values: Tensor, softmax_scale: float) -> Tensor:
    """`q [N, G, D]` over `keys [N, L, D]`, `values [N, L, V]`, L above 0 -> float32 `[N, G, V]`.

    Products are of 64 positions, the last of them filled up with zeros that have no weight.
    """
    count, length, depth = keys.shape
    tiles = -(-length // TILE_POSITIONS)
    beyond = tiles * TILE_POSITIONS - length
    keys, values = (
        torch.nn.functional.pad(x.float(), (0, 0, 0, beyond)).reshape(count * tiles, TILE_POSITIONS, -1)
        for x in (keys, values)
    )
    spread = q.float()[:, None].expand(count, tiles, *q.shape[1:]).reshape(count * tiles, -1, depth)
    logits = bmm(spread, keys.transpose(1, 2)).mul_(softmax_scale).view(count, tiles, -1, TILE_POSITIONS)
    if beyond:
        logits[:, -1, :, -beyond:] = -torch.inf
    weights = logits.sub_(logits.amax((1, 3), keepdim=True)).exp_()
    sums = weights.sum(-1)
    parts = bmm(weights.flatten(0, 1), values).view(count, tiles, q.shape[1], -1)
    total, out = sums[:, 0], parts[:, 0]
    for i in range(1, tiles):
        total, out = total + sums[:, i], out + parts[:, i]
    return out / total[..., None]


def _slots(block_table: Tensor, b: int, length: int, block_size: int) -> Tensor:
    positions = torch.arange(length, device=block_table.device)[None]
    return slots_of_positions(positions, block_table[b : b + 1], block_size)[0]


def paged_mla_decode(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """Attention of `q [B, H, R]` over the first `seq_lens` rows of each sequence -> `[B, H, value_dim]` in q's dtype.

    `latents [S, R]` a row per slot, keys whole and values their first `value_dim` columns; `block_table` int32
    `[B, max_blocks]`; `seq_lens` int32 `[B]`, the query's own token included, 0 gives zeros.
    """
    out = q.new_zeros(*q.shape[:2], value_dim)
    for b, length in enumerate(seq_lens.tolist()):
        if length:
            rows = latents[_slots(block_table, b, length, block_size)][None]
            out[b] = _attend(q[b : b + 1], rows, rows[..., :value_dim], softmax_scale)[0].to(q.dtype)
    return out


def paged_gqa_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
) -> Tensor:
    """Attention of `q [B, H, D]` over the first `seq_lens` tokens of each sequence -> `[B, H, D]` in q's dtype.

    `key_cache`, `value_cache` `[S, HKV, D]` a row per slot; query head h reads head `h // (H / HKV)`. The rest is as in
    `paged_mla_decode`.
    """
    out = torch.zeros_like(q)
    for b, length in enumerate(seq_lens.tolist()):
        if length:
            slots = _slots(block_table, b, length, block_size)
            keys, values = key_cache[slots].transpose(0, 1), value_cache[slots].transpose(0, 1)
            grouped = q[b].view(keys.shape[0], -1, q.shape[2])
            out[b] = _attend(grouped, keys, values, softmax_scale).view(q.shape[1:]).to(q.dtype)
    return out
