"""Tells each layer of a forward where its tokens live; set around the call, read inside the adopted modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llm_svc.adopt.operators import Operators
from llm_svc.adopt.packed_product import PackedProduct
from llm_svc.cache.storage import LayerCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Addresses of the tokens of one packed forward [1, T]; the first `num_decodes` tokens are decode steps.

    All index tensors are int32. For all B sequences: `slot_mapping` [T], `block_table` [B, max_blocks] (-1 pads),
    `cu_seqlens` [B + 1], `start_positions` [B] (tokens in the caches before this forward), `state_slots` [B]. For the
    D decode steps: `decode_seq_lens` [D], this token included. For the prefills alone: `prefill_cu_seqlens`, from 0.
    `delta_chunk_tokens` is the chunk of the delta rule; it divides the block size, so that cutting a prefill at block
    boundaries changes no bit of the state. `live` bool [T] says which rows are tokens where some only fill up a
    batch of fixed size: those have -1 as slot, state slot and blocks and 0 as length, and every operator passes over
    them.
    """

    operators: Operators
    packed_product: PackedProduct
    layers: tuple[LayerCache, ...]
    block_size: int
    delta_chunk_tokens: int
    num_decodes: int
    num_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    start_positions: torch.Tensor
    state_slots: torch.Tensor
    decode_seq_lens: torch.Tensor
    prefill_cu_seqlens: torch.Tensor
    live: torch.Tensor | None = None

    @property
    def has_prefill(self) -> bool:
        """Whether any token belongs to a prefill."""
        return self.num_tokens > self.num_decodes

    @property
    def decode_block_table(self) -> torch.Tensor:
        """Block table of the decode part."""
        return self.block_table[: self.num_decodes]

    @property
    def prefill_block_table(self) -> torch.Tensor:
        """Block table of the prefill part."""
        return self.block_table[self.num_decodes :]

    @property
    def decode_state_slots(self) -> torch.Tensor:
        """State slots of the decode part."""
        return self.state_slots[: self.num_decodes]

    @property
    def prefill_state_slots(self) -> torch.Tensor:
        """State slots of the prefill part."""
        return self.state_slots[self.num_decodes :]

    @property
    def prefill_start_positions(self) -> torch.Tensor:
        """Tokens each prefill sequence has in the caches before this forward."""
        return self.start_positions[self.num_decodes :]


_active = threading.local()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the current one of this thread; a forward inside a forward is refused."""
    if getattr(_active, "context", None) is not None:
        raise RuntimeError("a forward context is active in this thread already; forwards do not nest")
    _active.context = context
    try:
        yield
    finally:
        _active.context = None


def current_context() -> ForwardContext:
    """The context of the forward that is running in this thread."""
    context: ForwardContext | None = getattr(_active, "context", None)
    if context is None:
        raise RuntimeError("an adopted module was called outside a forward context")
    return context
