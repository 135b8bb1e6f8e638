"""Definition of indexer key pooling in plain torch; it does not know how pools are scored."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.packed import sequence_of_token
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)


def index_pool(
    keys: Tensor,
    gates: Tensor,
    ape: Tensor,
    tail: Tensor,
    pool_cache: Tensor,
    state_slots: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    block_size: int,
) -> None:
    """Pools every group of P consecutive tokens that this call completes, and keeps the incomplete rest.

    `keys`, `gates` `[T, D]`; `ape [P, D]`; `tail [N, P, 2, D]` (0: key, 1: gate); `pool_cache [blocks * block_size /
    P, D]`; `state_slots`, `start_positions` int32 `[B]`; `block_table` int32 `[B, max_blocks]`; `cu_seqlens` int32
    `[B + 1]`. Writes `tail` and `pool_cache` in place; tail rows of a finished pool keep what they held. A sequence
    whose state slot is -1 is padding: nothing is read or written for it. Formula:
    `Glm5NextTextIndexer.get_pooled_states`, pooled key = sum over the pool of softmax(gate + ape) * key, per channel.
    """
    tokens, pool = len(keys), len(ape)
    device = keys.device
    bounds = cu_seqlens.long()
    ends = start_positions.long() + bounds[1:] - bounds[:-1]
    of_sequence = torch.stack([bounds[:-1], start_positions.long(), ends, state_slots.long()], 1)
    sequence = sequence_of_token(cu_seqlens, tokens)
    first, start, end, slot = of_sequence[sequence].unbind(1)
    position = torch.arange(tokens, device=device) + start - first
    live = slot >= 0
    offset = position % pool

    done = (live & (offset == pool - 1)).nonzero()[:, 0]
    if len(done):
        member = torch.arange(pool, device=device)
        source = done[:, None] - (pool - 1) + member
        carried = (source < first[done][:, None])[..., None]
        source = source.clamp(min=0)
        kept = tail[slot[done]].float()
        key = torch.where(carried, kept[:, :, 0], keys[source].float())
        logit = torch.where(carried, kept[:, :, 1], gates[source].float()) + ape.float()
        weight = torch.exp(logit - logit.amax(1, keepdim=True))
        weighted = weight * key
        total, pooled = weight[:, 0], weighted[:, 0]
        for j in range(1, pool):
            total, pooled = total + weight[:, j], pooled + weighted[:, j]
        at = position[done]
        block = block_table.long()[sequence[done], torch.div(at, block_size, rounding_mode="floor")]
        row = block * (block_size // pool) + torch.div(at % block_size, pool, rounding_mode="floor")
        pool_cache.index_copy_(0, row, (pooled / total).to(pool_cache.dtype))

    rest = (live & (position - offset + pool > end)).nonzero()[:, 0]
    tail[slot[rest], offset[rest]] = torch.stack([keys[rest], gates[rest]], 1).to(tail.dtype)
