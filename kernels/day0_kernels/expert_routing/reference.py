"""Definitions of the gate's choice and of the way to rows sorted by expert and back; they know no expert's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels import row_invariant
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

LEAST_SUM = 1e-20


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "sigmoid":
        return row_invariant.sigmoid(logits)
    if score == "softmax":
        powers = torch.exp(logits - logits.amax(1, keepdim=True))
        return powers / powers.sum(1, keepdim=True)
    if score == "sqrt_softplus":
        return (logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))).sqrt()
    raise ValueError(f"score must be sigmoid, softmax or sqrt_softplus, is {score!r}")


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
    """`logits` float32 `[T, E]`, `bias` float32 `[E]` -> ids int32 `[T, top_k]`, weights float32 `[T, top_k]`.

    Chosen are the largest of scores + bias, ties to the lowest id, the largest first; NaN counts as the largest, as in
    `torch.topk`. A group counts with its two best; experts of other groups come only when the best ones have too few.
    Weights are scores without the bias. ValueError where a number does not fit the experts.
    """
    experts = logits.shape[1]
    check_choice(experts, top_k, groups, topk_groups)
    scores = _scores(logits, score)
    choice = scores + bias
    if groups > 1:
        best = choice.view(len(choice), groups, -1).topk(2, -1).values.sum(-1)
        order = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :topk_groups]
        open_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
        closed = ~open_groups.repeat_interleave(experts // groups, 1)
        choice = choice.masked_fill(closed, -torch.inf)
    ids = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
    return ids.int(), weights * scaling


def check_choice(experts: int, top_k: int, groups: int, topk_groups: int) -> None:
    """ValueError that names the number which does not fit."""
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1 to {experts}, the number of experts, is {top_k}")
    if groups < 1 or experts % groups or (groups > 1 and experts // groups < 2):
        raise ValueError(f"groups must divide {experts} experts into groups of 2 or more, is {groups}")
    if not 1 <= topk_groups <= groups:
        raise ValueError(f"topk_groups must be 1 to {groups}, the number of groups, is {topk_groups}")


def permute_rows(x: Tensor, topk_ids: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`x [T, D]`, `topk_ids` int32 `[T, K]` -> rows `[T K, D]`, expert_offsets int32 `[E + 1]`, places int32 `[T, K]`.

    The rows of an expert lie together, in the order of t and then k. An id that is no expert's has no row: its place is
    -1, and the rows behind the last offset, as many as there are such ids, are zeros.
    """
    top_k = topk_ids.shape[1]
    flat = topk_ids.reshape(-1).long()
    known = (flat >= 0) & (flat < experts)
    owner = torch.where(known, flat, experts)
    ordered, order = torch.sort(owner, stable=True)
    bounds = torch.arange(experts + 1, device=x.device)
    expert_offsets = torch.searchsorted(ordered, bounds).int()
    # Ids of no expert are sorted behind all others.
    rows = x[order // top_k].masked_fill((ordered == experts).unsqueeze(1), 0.0)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=x.device)
    return rows, expert_offsets, places.masked_fill(~known, -1).int().view_as(topk_ids)


def unpermute_rows(rows: Tensor, topk_weights: Tensor, places: Tensor) -> Tensor:
    """`rows [N, D]`, `topk_weights` float32 `[T, K]`, `places` int32 `[T, K]` -> `[T, D]` in rows' dtype.

    `out[t]` is the sum over k, in that order and in float32, of `topk_weights[t, k] * rows[places[t, k]]`; a place of
    -1 adds nothing.
    """
    tokens, top_k = places.shape
    if not len(rows) or not top_k:
        return rows.new_zeros(tokens, rows.shape[1])
    held = (places >= 0).unsqueeze(2)
    picked = rows[places.clamp(min=0).long()].float() * topk_weights.unsqueeze(2)
    # A place of -1 may have picked anything.
    picked = picked.masked_fill(~held, 0.0)
    out = picked[:, 0]
    for k in range(1, top_k):
        out = out + picked[:, k]
    return out.to(rows.dtype)
