"""Runs a definition's experts as two grouped matrix products over tokens sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from llm_svc.forward_context import current_context


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden [T, hidden], top_k_index int [T, top_k], top_k_weights [T, top_k] -> [T, hidden], in hidden's dtype.

    The gate between the two products is the definition's own `_apply_gate`, so that its clamps stay upstream's.
    """
    tokens, top_k = top_k_index.shape
    expert_gemm = current_context().operators.expert_gemm
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=module.num_experts)
    offsets = torch.zeros(module.num_experts + 1, dtype=torch.int32, device=hidden.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    rows = hidden[order // top_k]
    gated = module._apply_gate(expert_gemm(rows, module.gate_up_proj, offsets))
    out = expert_gemm(gated, module.down_proj, offsets)
    by_token = torch.empty_like(out)
    by_token[order] = out
    by_token = by_token.view(tokens, top_k, -1) * top_k_weights.unsqueeze(-1)
    return by_token.sum(dim=1).to(hidden.dtype)
