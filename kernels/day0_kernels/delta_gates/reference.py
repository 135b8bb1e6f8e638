"""Definition of the gates before and behind the delta rule in plain torch; it does not know the rule."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.row_invariant import sigmoid
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

# From here on softplus(x) is x.
LINEAR_FROM = 20.0


def delta_gates(
    forget: Tensor, rate: Tensor, dt_bias: Tensor, a_log: Tensor, *, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Log decay float32 `[T, H, K]` and step size `[T, H]` in rate's dtype, which the delta rule takes.

    `forget [T, H, K]`, `rate [T, H]`, `dt_bias` float32 `[H K]`, `a_log` float32 `[H]`. Formula:
    `Glm5NextTextForgetGate.forward` behind its products, and the sigmoid of `b_proj`.
    """
    _, heads, key_dim = forget.shape
    x = forget.float() + dt_bias.float().view(heads, key_dim)
    decay = torch.exp(a_log.float()).view(heads, 1)
    if lower_bound is not None:
        g = lower_bound * sigmoid(decay * x)
    else:
        g = -decay * torch.where(x > LINEAR_FROM, x, torch.log(1.0 + torch.exp(x)))
    return g, sigmoid(rate.float()).to(rate.dtype)


def gated_norm(x: Tensor, gate: Tensor, norm_weight: Tensor, *, norm_eps: float) -> Tensor:
    """`x`, `gate [T, H, V]`, `norm_weight [V]` -> `[T, H, V]` in x's dtype, computed in float32.

    Formula: `Glm5NextTextRMSNormGated.forward`.
    """
    wide = x.float()
    unit = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + norm_eps)
    return (norm_weight.float() * unit * sigmoid(gate.float())).to(x.dtype)
