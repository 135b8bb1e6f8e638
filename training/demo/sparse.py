"""Latent attention with the pooled indexer for training: dense or by the layer's own choice; it knows no cache.

Sequences start at position 0 and are padded at the right, so a pool is four consecutive positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores of all heads are `[B, queries, HI, P]`; queries are taken in parts of at most this many elements.
SCORE_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class SparseSizes:
    """Of one layer, as in upstream's configuration."""

    heads: int
    qk_dim: int
    v_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_kpool: int
    eps: float


def pool_keys(weights: dict[str, Tensor], x: Tensor, s: SparseSizes) -> Tensor:
    """Pooled keys `[B, P, index_dim]` of `[B, L, hidden]`, complete pools only."""
    pools = x.shape[1] // s.index_kpool
    x = x[:, : pools * s.index_kpool]
    keys = F.linear(x, weights["indexer.wk.weight"])
    keys = F.layer_norm(
        keys, keys.shape[-1:], weights["indexer.k_norm.weight"], weights["indexer.k_norm.bias"], eps=1e-6
    )
    gate = F.linear(x, weights["indexer.index_kpool_compress_gate"]).float()
    gate = gate.unflatten(1, (pools, s.index_kpool)) + weights["indexer.index_kpool_compress_ape"].float()
    return (gate.softmax(2).to(keys.dtype) * keys.unflatten(1, (pools, s.index_kpool))).sum(2)


def index_scores(weights: dict[str, Tensor], x: Tensor, q_latent: Tensor, pools: Tensor, s: SparseSizes) -> Tensor:
    """Scores float32 `[B, Q, P]` of queries whose inputs are `[B, Q, hidden]` and `[B, Q, q_lora_rank]`."""
    q = F.linear(q_latent, weights["indexer.wq_b.weight"]).unflatten(-1, (s.index_heads, s.index_dim))
    scores = torch.matmul(q.flatten(1, 2).float(), pools.float().transpose(1, 2)).relu_()
    scores = scores.unflatten(1, (-1, s.index_heads))
    # The factor 1/√dim of each product stands here: it is positive, and this tensor is small.
    factor = F.linear(x, weights["indexer.weights_proj.weight"]).float() * (s.index_heads * s.index_dim) ** -0.5
    return torch.matmul(factor.unsqueeze(-2), scores).squeeze(-2)


def complete_pools(positions: Tensor, pools: int, kpool: int) -> Tensor:
    """Whether a query at `positions` `[...]` may choose each pool: bool `[..., P]`."""
    ends = torch.arange(pools, device=positions.device) * kpool + kpool - 1
    return ends <= positions.unsqueeze(-1)


@torch.no_grad()
def own_choice(weights: dict[str, Tensor], x: Tensor, q_latent: Tensor, s: SparseSizes) -> Tensor:
    """Which positions a query attends to, bool `[B, 1, L, L]`: its top pools and the tokens of its incomplete one."""
    batch, length, _ = x.shape
    keys = pool_keys(weights, x, s)
    pools = keys.shape[1]
    positions = torch.arange(length, device=x.device)
    visible = complete_pools(positions, pools, s.index_kpool)
    choose = min(s.index_topk // s.index_kpool, pools)
    part = max(1, SCORE_ELEMENTS // max(1, batch * s.index_heads * pools))
    chosen = torch.zeros(batch, length, pools, dtype=torch.bool, device=x.device)
    for start in range(0, length if pools else 0, part):
        some = slice(start, min(start + part, length))
        scores = index_scores(weights, x[:, some], q_latent[:, some], keys, s)
        scores = scores.masked_fill(~visible[some], torch.finfo(scores.dtype).min)
        best = scores.topk(choose, -1, sorted=False).indices
        chosen[:, some].scatter_(-1, best, torch.ones_like(best, dtype=torch.bool))
    chosen &= visible
    tokens = chosen.unsqueeze(-1).expand(-1, -1, -1, s.index_kpool).flatten(2)
    tokens = F.pad(tokens, (0, length - tokens.shape[-1]))
    tail_start = (positions + 1) // s.index_kpool * s.index_kpool
    tail = (positions >= tail_start[:, None]) & (positions <= positions[:, None])
    return (tokens | tail).unsqueeze(1)


def sparse_layer(
    weights: dict[str, Tensor], x: Tensor, s: SparseSizes, own_topk: bool, kl_positions: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Upstream's `Glm5NextTextAttention` of `[B, L, hidden]`, and the indexer's KL at `kl_positions` int64 `[B, Q]`.

    Dense and causal unless `own_topk`; with no more than `index_topk` positions both are the same.
    """
    batch, length, _ = x.shape
    q_latent = F.linear(x, weights["q_a_proj.weight"])
    q_latent = F.rms_norm(q_latent, q_latent.shape[-1:], weights["q_a_layernorm.weight"], s.eps)
    q = F.linear(q_latent, weights["q_b_proj.weight"]).view(batch, length, s.heads, s.qk_dim).transpose(1, 2)
    latent = F.linear(x, weights["kv_a_proj_with_mqa.weight"])
    latent = F.rms_norm(latent, latent.shape[-1:], weights["kv_a_layernorm.weight"], s.eps)
    expanded = F.linear(latent, weights["kv_b_proj.weight"]).view(batch, length, s.heads, s.qk_dim + s.v_dim)
    k, v = expanded.transpose(1, 2).split([s.qk_dim, s.v_dim], -1)
    scaling = s.qk_dim**-0.5
    if own_topk and length > s.index_topk:
        mask = own_choice(weights, x, q_latent, s)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    out = F.linear(out.transpose(1, 2).flatten(2), weights["o_proj.weight"])
    kl = None
    if kl_positions is not None:
        kl = indexer_kl(weights, x.detach(), q_latent.detach(), q.detach(), k.detach(), kl_positions, s)
    return out, kl


def indexer_kl(
    weights: dict[str, Tensor], x: Tensor, q_latent: Tensor, q: Tensor, k: Tensor, positions: Tensor, s: SparseSizes
) -> Tensor:
    """KL divergence, a float32 scalar, of the indexer's distribution over pools from the attention's; see the recipe.

    The target is dense attention's probabilities, mean over heads, summed in each complete pool and renormalised; the
    prediction is the log-softmax of the index scores. Inputs other than the indexer's weights must be detached.
    """
    length, pools = x.shape[1], x.shape[1] // s.index_kpool
    at = positions.unsqueeze(-1)
    visible = complete_pools(positions, pools, s.index_kpool)
    with torch.no_grad():
        some_q = q.gather(2, at.unsqueeze(1).expand(-1, s.heads, -1, s.qk_dim))
        logits = torch.matmul(some_q, k.transpose(-1, -2)).float() * s.qk_dim**-0.5
        future = torch.arange(length, device=x.device) > at
        attention = logits.masked_fill(future.unsqueeze(1), float("-inf")).softmax(-1).mean(1)
        target = attention[..., : pools * s.index_kpool].unflatten(-1, (pools, s.index_kpool)).sum(-1)
        target = target.masked_fill(~visible, 0.0)
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    some_x = x.gather(1, at.expand(-1, -1, x.shape[-1]))
    some_latent = q_latent.gather(1, at.expand(-1, -1, q_latent.shape[-1]))
    scores = index_scores(weights, some_x, some_latent, pool_keys(weights, x, s), s)
    # A finite floor, not -inf: a query without any complete pool would otherwise be NaN.
    predicted = scores.masked_fill(~visible, -1e4).log_softmax(-1)
    divergence = (target * (target.clamp_min(1e-9).log() - predicted)).sum(-1)
    counted = visible.any(-1)
    return (divergence * counted).sum() / counted.sum().clamp_min(1)
