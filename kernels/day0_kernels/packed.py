"""Where packed tokens belong: sequence, position and cache slot of each; it knows no operator."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Sequence index int64 `[T]` of each packed token, from `cu_seqlens` int32 `[B + 1]` (empty sequences allowed)."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    return torch.repeat_interleave(lengths, output_size=tokens)


def slots_of_positions(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Slots int64 of `positions [B, ...]` (int64, in range) through `block_table` int32 `[B, max_blocks]`."""
    flat = positions.reshape(len(positions), -1)
    blocks = block_table.long().gather(1, torch.div(flat, block_size, rounding_mode="floor"))
    return (blocks * block_size + flat % block_size).view(positions.shape)
