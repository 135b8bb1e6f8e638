"""Runs a definition's experts as two grouped matrix products over tokens sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from llm_svc.expert_residency import ResidentExperts
from llm_svc.forward_context import current_context


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden [T, hidden], top_k_index int [T, top_k], top_k_weights [T, top_k] -> [T, hidden], in hidden's dtype.

    The gate between the two products is the definition's own `_apply_gate`, so that its clamps stay upstream's.
    """
    context = current_context()
    ids = top_k_index.int()
    if context.live is not None:
        # A row that stands for no token asks for no expert: none is read for it.
        ids = torch.where(context.live[:, None], ids, -1)
    rows, offsets, places = context.operators.permute_rows(hidden, ids, experts=module.num_experts)
    resident: ResidentExperts | None = getattr(module, "resident", None)
    out = _float(module, rows, offsets) if resident is None else _packed(module, resident, rows, offsets, len(hidden))
    mixed: torch.Tensor = context.operators.unpermute_rows(out, top_k_weights.float(), places)
    return mixed.to(hidden.dtype)


def _float(module: Any, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows [N, hidden] sorted by expert, offsets int32 [E + 1] -> [N, hidden]."""
    product = current_context().operators.expert_gemm
    out: torch.Tensor = product(
        module._apply_gate(product(rows, module.gate_up_proj, offsets)), module.down_proj, offsets
    )
    return out


def _packed(
    module: Any, resident: ResidentExperts, rows: torch.Tensor, offsets: torch.Tensor, tokens: int
) -> torch.Tensor:
    """The same on packed experts, part by part as they are on the device."""
    product = current_context().packed_product
    converts = product.converts(tokens)
    out = torch.empty_like(rows)
    for part in resident.placed(offsets):
        mine = rows if part.rows is None else rows[part.rows]
        gate_up = product(mine, part.gate_up, part.offsets, converts=converts)
        down = product(module._apply_gate(gate_up), part.down, part.offsets, converts=converts)
        if part.rows is None:
            return down
        out[part.rows] = down
    return out
