"""Definition of attention over the residual bank in plain torch; it does not know which layer made a source."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.row_invariant import softmax
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)


def attention_residual(
    sources: Tensor, query: Tensor, *, logit_scale: float, norm_eps: float, normed_values: bool
) -> Tensor:
    """Every token's mix of its own sources: `sources [T, N, D]`, `query [Q, D]` -> `[T, Q, D]` in sources' dtype.

    Formulas: block attention residuals of Kimi K3 (values as they are, logit_scale 1, a norm weight folded into the
    query) and `Inkling2BlockAttentionResidual.forward` (normed values, logit_scale D^-0.5). ValueError without a
    source.
    """
    if sources.shape[1] == 0:
        raise ValueError("sources must be at least 1, N is 0")
    wide = sources.float()
    unit = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + norm_eps)
    # Sums over the last dimension: no row's bits depend on how many rows there are.
    logits = torch.stack([(unit * row).sum(-1) for row in query.float()], 1)
    weights = softmax(logits * logit_scale)
    values = unit if normed_values else wide
    out = weights[:, :, :1] * values[:, None, 0]
    for n in range(1, values.shape[1]):
        out = out + weights[:, :, n : n + 1] * values[:, None, n]
    return out.to(sources.dtype)
