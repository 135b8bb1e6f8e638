"""Routed experts for training as products over blocks of rows, all shapes static; it knows no quantisation.

Rows are sorted by expert and every expert's group is padded to whole blocks, so each block has one expert: a plain
batched product with the block's own weight. Nothing is dropped and nothing depends on the counts but contents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class GatherRows(torch.autograd.Function):
    """`x[index]`; its gradient gathers too, by `inverse` `[rows of x, n]`: where each row of x went."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        rows, copies = inverse.shape
        return grad.index_select(0, inverse.flatten()).view(rows, copies, *grad.shape[1:]).sum(1), None, None


class SumRows(torch.autograd.Function):
    """`x[index].sum(1)` for index `[T, n]`; `source` says for each row of x which of the T sums has it."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        rows, copies = index.shape
        return x.index_select(0, index.flatten()).view(rows, copies, *x.shape[1:]).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (source,) = ctx.saved_tensors
        return grad.index_select(0, source), None, None


class BlockWeights(torch.autograd.Function):
    """`weight[expert]` for `[E, N, K]` weights and int64 `[blocks]`; the gradient is summed by one product."""

    @staticmethod
    def forward(ctx, weight: Tensor, expert: Tensor) -> Tensor:
        ctx.save_for_backward(expert)
        ctx.experts = weight.shape[0]
        return weight.index_select(0, expert)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (expert,) = ctx.saved_tensors
        chosen = torch.arange(ctx.experts, device=expert.device)[:, None] == expert
        return (chosen.to(grad.dtype) @ grad.flatten(1)).view(-1, *grad.shape[1:]), None


def route(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Upstream's sigmoid choice of one group: weights float32 and ids int64, both `[T, top_k]`."""
    scores = logits.sigmoid()
    topk_ids = (scores + bias).topk(top_k, -1, sorted=False).indices
    topk_weights = scores.gather(1, topk_ids)
    return topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20) * scaling, topk_ids


def count_choices(topk_ids: Tensor, valid: Tensor, experts: int) -> Tensor:
    """How many valid tokens chose each expert: float32 `[experts]` of int64 `[T, top_k]` and bool `[T]`."""
    chosen = topk_ids.unsqueeze(-1) == torch.arange(experts, device=topk_ids.device)
    return (chosen.any(1) & valid[:, None]).sum(0, dtype=torch.float32)


def block_rows_for(tokens: int) -> int:
    """Rows in a block: large enough that gathered weights cost little, small enough that padding does."""
    return 256 if tokens >= 16_384 else 16


class Plan:
    """Where each of `T * top_k` rows lies among padded blocks; all tensors int64, all shapes known beforehand.

    `dest` `[T, top_k]` rows of the padded arrangement; `source` `[M]` flat choice of each padded row (0 in padding);
    `real` `[M]` whether a row is no padding; `expert` `[blocks]`.
    """

    def __init__(self, topk_ids: Tensor, experts: int) -> None:
        tokens, top_k = topk_ids.shape
        choices = tokens * top_k
        self.block_rows = block_rows_for(tokens)
        self.blocks = choices // self.block_rows + experts
        device = topk_ids.device
        flat, order = topk_ids.flatten().to(torch.int32).sort(stable=True)
        flat = flat.to(torch.int64)
        counts = (flat[:, None] == torch.arange(experts, device=device)).sum(0)
        padded_ends = ((counts + self.block_rows - 1) // self.block_rows * self.block_rows).cumsum(0)
        starts = counts.cumsum(0) - counts
        padded_starts = F.pad(padded_ends[:-1], (1, 0))
        rows = torch.arange(choices, device=device) + (padded_starts - starts)[flat]
        padded = self.blocks * self.block_rows
        self.dest = torch.empty_like(order).scatter_(0, order, rows).view(tokens, top_k)
        self.source = torch.zeros(padded, dtype=torch.int64, device=device).scatter_(0, rows, order)
        self.real = torch.zeros(padded, dtype=torch.bool, device=device).scatter_(0, rows, torch.ones_like(rows).bool())
        first_rows = torch.arange(self.blocks, device=device) * self.block_rows
        self.expert = torch.searchsorted(padded_ends, first_rows, right=True).clamp(max=experts - 1)
        self.token = self.source // top_k


def experts_layer(weights: dict[str, Tensor], x: Tensor, plan: Plan, topk_weights: Tensor, limit: float) -> Tensor:
    """Sum over each token's experts, `[T, hidden]`, of x `[T, hidden]`; the choice's weights are float32 `[T, top_k]`.

    A padding row holds some token's values and the weight 0: it adds nothing, and nothing flows back through it.
    """
    rows = GatherRows.apply(x, plan.token, plan.dest).view(plan.blocks, plan.block_rows, -1)
    factor = GatherRows.apply(topk_weights.to(x.dtype).flatten(), plan.source, plan.dest.view(-1, 1)) * plan.real
    gate_up = torch.bmm(rows, BlockWeights.apply(weights["gate_up_proj"], plan.expert).transpose(1, 2))
    gate, up = gate_up.chunk(2, -1)
    act = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * factor.view(plan.blocks, plan.block_rows, 1)
    out = torch.bmm(act, BlockWeights.apply(weights["down_proj"], plan.expert).transpose(1, 2))
    return SumRows.apply(out.flatten(0, 1), plan.dest, plan.token)


def moe_layer(
    weights: dict[str, Tensor], bias: Tensor, x: Tensor, valid: Tensor, top_k: int, scaling: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Upstream's `Glm5NextTextMoE` without shared experts of `[B, L, hidden]`, and the choices' counts `[experts]`."""
    flat = x.flatten(0, 1)
    logits = F.linear(flat.float(), weights["gate.weight"].float())
    topk_weights, topk_ids = route(logits, bias, top_k, scaling)
    counts = count_choices(topk_ids, valid.flatten(), bias.shape[0])
    inner = {name.removeprefix("experts."): w for name, w in weights.items() if name.startswith("experts.")}
    return experts_layer(inner, flat, Plan(topk_ids, bias.shape[0]), topk_weights, limit).view_as(x), counts
