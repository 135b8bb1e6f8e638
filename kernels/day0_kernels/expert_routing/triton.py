"""The gate's choice and the way to rows sorted by expert and back on an NVIDIA GPU; device code in `_triton_*`.

No launch waits for a number from the device: what depends on the ids is as large as it can get. Nothing is added up by
atomics, so that every result has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.expert_routing.reference import check_choice
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

# A program looks at every expert at once, and at every expert of a token.
_MOST_EXPERTS = 4095
_MOST_CHOSEN = 64
_SCORES = ("sigmoid", "softmax", "sqrt_softplus")
# Entries whose order a program finds by comparing each with each, how many at once, and chunks added up at once.
_CHUNK, _PIECE, _STEP = 256, 32, 32
_SPREAD_BLOCK, _GATHER_BLOCK = 1024, 1024
_WORDS = {4: torch.int32, 2: torch.int16}


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    if sizes.get("E", 0) > _MOST_EXPERTS:
        return f"E must be at most {_MOST_EXPERTS}, is {sizes['E']}"
    if sizes.get("K", 0) > _MOST_CHOSEN:
        return f"K must be at most {_MOST_CHOSEN}, is {sizes['K']}"
    return device_refusal(device)


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def select_experts(
    logits: Tensor,
    bias: Tensor,
    *,
    score: str,
    top_k: int,
    groups: int,
    topk_groups: int,
    normalise: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """As the reference, in one launch; the scores of two experts that differ in the last bit may change places."""
    from day0_kernels.expert_routing._triton_select import select_kernel

    tokens, experts = logits.shape
    check_choice(experts, top_k, groups, topk_groups)
    if score not in _SCORES:
        raise ValueError(f"score must be {', '.join(_SCORES)}, is {score!r}")
    topk_ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    topk_weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return topk_ids, topk_weights
    select_kernel[(tokens,)](
        logits.contiguous(),
        bias.contiguous(),
        topk_ids,
        topk_weights,
        float(scaling),
        E=experts,
        E_PAD=_power_of_two(experts),
        K=top_k,
        K_PAD=_power_of_two(top_k),
        GROUPS=groups,
        GROUPS_PAD=_power_of_two(groups),
        TOPK_GROUPS=topk_groups,
        SCORE=score,
        NORMALISE=normalise,
        # Of one warp no maximum waits for another.
        num_warps=1 if experts <= 1024 else 4,
    )
    return topk_ids, topk_weights


def permute_rows(x: Tensor, topk_ids: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, in three launches: numbers within chunks of entries, places, and the rows, each read once.

    Where one chunk holds all entries two will do.
    """
    from day0_kernels.expert_routing._triton_rows import count_kernel, place_kernel, spread_kernel

    (tokens, width), top_k = x.shape, topk_ids.shape[1]
    entries = tokens * top_k
    rows = x.new_empty(entries, width)
    places = torch.empty_like(topk_ids, memory_format=torch.contiguous_format)
    if entries == 0:
        return rows, topk_ids.new_zeros(experts + 1), places
    ids = topk_ids.contiguous()
    expert_offsets, spots = ids.new_empty(experts + 1), ids.new_empty(entries)
    # A few entries are compared in fewer steps; which place an entry gets does not depend on it.
    chunk = min(_CHUNK, max(_PIECE, _power_of_two(entries)))
    chunks, padded = -(-entries // chunk), _power_of_two(experts + 1)
    sizes = {
        "E": experts,
        "E_PAD": padded,
        "BLOCK": chunk,
        "PIECE": min(chunk, _PIECE),
        "num_warps": 8 if chunk == _CHUNK else 4,
    }
    ranks = counts = None
    if chunks > 1:
        ranks, counts = ids.new_empty(entries), ids.new_empty(chunks, padded)
        count_kernel[(chunks,)](ids, ranks, counts, entries, **sizes)
    step = max(1, min(_STEP, 16384 // padded))
    place_kernel[(chunks,)](ids, ranks, counts, expert_offsets, spots, places, entries, chunks, STEP=step, **sizes)
    word, block = _WORDS[x.element_size()], min(_SPREAD_BLOCK, _power_of_two(width))
    spread_kernel[(tokens, -(-width // block))](
        x.contiguous().view(word),
        spots,
        places,
        rows.view(word),
        D=width,
        K=top_k,
        K_PAD=_power_of_two(top_k),
        BLOCK_D=block,
        num_warps=4,
    )
    return rows, expert_offsets, places


def unpermute_rows(rows: Tensor, topk_weights: Tensor, places: Tensor) -> Tensor:
    """As the reference, in one launch."""
    from day0_kernels.expert_routing._triton_rows import gather_kernel

    (tokens, top_k), width = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    if tokens == 0:
        return out
    block = min(_GATHER_BLOCK, _power_of_two(width))
    gather_kernel[(tokens, -(-width // block))](
        rows.contiguous(),
        topk_weights.contiguous(),
        places.contiguous(),
        out,
        D=width,
        K=top_k,
        BLOCK_D=block,
        num_warps=4,
    )
    return out
