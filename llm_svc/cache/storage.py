"""The tensors behind blocks, state slots and snapshots, sized from the upstream config."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class IndexedLayerCache:
    """Caches of one sparse-attention layer, addressed by blocks.

    `latents` [num_blocks * block_size, kv_lora_rank]; `pool_keys` [num_blocks * block_size // index_kpool,
    index_head_dim], None where the layer shares another's choice; `index_tail` [num_slots, index_kpool, 2,
    index_head_dim]: key and gate of the tokens of the incomplete pool, by position modulo the pool size.
    """

    latents: torch.Tensor
    pool_keys: torch.Tensor | None
    index_tail: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RecurrentLayerCache:
    """States of one gated-delta layer, one row a state slot; float32.

    `conv_state` [num_slots, channels, kernel - 1]; `delta_state` [num_slots, heads, K, V]. The `saved_` tensors hold
    the snapshots, one row each.
    """

    conv_state: torch.Tensor
    delta_state: torch.Tensor
    saved_conv_state: torch.Tensor
    saved_delta_state: torch.Tensor

    def clear(self, slot: int) -> None:
        """Zeroes a row: the state before the first token."""
        self.conv_state[slot].zero_()
        self.delta_state[slot].zero_()

    def restore(self, slot: int, snapshot: int) -> None:
        """Copies a snapshot into a row."""
        self.conv_state[slot].copy_(self.saved_conv_state[snapshot])
        self.delta_state[slot].copy_(self.saved_delta_state[snapshot])

    def save(self, slot: int, snapshot: int) -> None:
        """Copies a row into a snapshot."""
        self.saved_conv_state[snapshot].copy_(self.conv_state[slot])
        self.saved_delta_state[snapshot].copy_(self.delta_state[slot])


LayerCache = IndexedLayerCache | RecurrentLayerCache


def layer_bytes(caches: tuple[LayerCache, ...]) -> int:
    """Bytes all cache tensors take."""
    tensors = [getattr(cache, name) for cache in caches for name in cache.__slots__]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
