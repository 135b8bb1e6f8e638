"""Second definitions of the gates around the delta rule, one head at a time, from the README formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Results = dict[str, Tensor]


def delta_gates(forget: Tensor, rate: Tensor, dt_bias: Tensor, a_log: Tensor, *, lower_bound: float | None) -> Results:
    tokens, heads, key_dim = forget.shape
    g, beta = torch.zeros_like(forget), torch.zeros_like(rate)
    for t in range(tokens):
        for h in range(heads):
            decay = math.exp(float(a_log[h]))
            beta[t, h] = 1 / (1 + math.exp(-float(rate[t, h])))
            for i in range(key_dim):
                x = float(forget[t, h, i]) + float(dt_bias[h * key_dim + i])
                g[t, h, i] = (
                    -decay * math.log1p(math.exp(x))
                    if lower_bound is None
                    else (lower_bound / (1 + math.exp(-decay * x)))
                )
    return {"g": g, "beta": beta}


def gated_norm(x: Tensor, gate: Tensor, norm_weight: Tensor, *, norm_eps: float) -> Results:
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for h in range(x.shape[1]):
            row = x[t, h]
            out[t, h] = norm_weight * row / torch.sqrt(row @ row / len(row) + norm_eps) / (1 + torch.exp(-gate[t, h]))
    return {"out": out}


DEFINED: Mapping[str, Callable[..., Results]] = {fn.__name__: fn for fn in (delta_gates, gated_norm)}
