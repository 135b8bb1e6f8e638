"""Runs a definition's experts as two grouped matrix products over tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm_svc.forward_context import current_context

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows [N, in] sorted by expert and their offsets int32 [E + 1] to [N, out]."""


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden [T, hidden], top_k_index int [T, top_k], top_k_weights [T, top_k] -> [T, hidden], in hidden's dtype.

    The gate between the two products is the definition's own `_apply_gate`, so that its clamps stay upstream's.
    """
    tokens, top_k = top_k_index.shape
    gate_up, down = _products(module)
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=module.num_experts)
    offsets = torch.zeros(module.num_experts + 1, dtype=torch.int32, device=hidden.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    rows = hidden[order // top_k]
    out = down(module._apply_gate(gate_up(rows, offsets)), offsets)
    by_token = torch.empty_like(out)
    by_token[order] = out
    by_token = by_token.view(tokens, top_k, -1) * top_k_weights.unsqueeze(-1)
    return by_token.sum(dim=1).to(hidden.dtype)


def _products(module: Any) -> tuple[Product, Product]:
    """Gate and up in one, then down; on packed weights where the module has those."""
    operators = current_context().operators
    packed = getattr(module, "packed", None)
    if packed is None:
        return (
            lambda rows, offsets: operators.expert_gemm(rows, module.gate_up_proj, offsets),
            lambda rows, offsets: operators.expert_gemm(rows, module.down_proj, offsets),
        )
    return (
        lambda rows, offsets: operators.mxfp4_expert_gemm(rows, packed.gate_up.codes, packed.gate_up.scales, offsets),
        lambda rows, offsets: operators.mxfp4_expert_gemm(rows, packed.down.codes, packed.down.scales, offsets),
    )
