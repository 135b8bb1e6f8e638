"""Definition of the gate between an expert's two products; it does not know experts."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels import row_invariant
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

GROUP = 128
LARGEST_E4M3 = 448.0


def _gated(gate_up: Tensor, limit: float | None, alpha: float, up_offset: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * row_invariant.sigmoid(alpha * gate) * (up + up_offset)


def swiglu(gate_up: Tensor, *, limit: float | None, alpha: float, up_offset: float) -> Tensor:
    """`gate_up [N, 2 F]`, gate before up -> `[N, F]` in its dtype, computed in float32.

    `g * sigmoid(alpha * g) * (u + up_offset)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`:
    `_apply_gate` of glm5_next and deepseek_v4 (alpha 1, offset 0) and of gpt_oss (1.702, 1).
    """
    return _gated(gate_up, limit, alpha, up_offset).to(gate_up.dtype)


def swiglu_fp8(gate_up: Tensor, *, limit: float | None, alpha: float, up_offset: float) -> tuple[Tensor, Tensor]:
    """The same as e4m3fn bits uint8 `[N, F]` and scales float32 `[N, F / 128]`; F must be a multiple of 128.

    A scale is the largest magnitude of its 128 columns / 448, and 1 where that is 0. What is quantised is the float32
    value. A NaN makes its 128 columns and their scale NaN.
    """
    width = gate_up.shape[1] // 2
    if width % GROUP:
        raise ValueError(f"F must be a multiple of {GROUP}, is {width}")
    grouped = _gated(gate_up, limit, alpha, up_offset).view(len(gate_up), width // GROUP, GROUP)
    peaks = grouped.abs().amax(-1)
    scales = torch.where(peaks == 0, 1.0, peaks / LARGEST_E4M3)
    values = (grouped / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return values.view(torch.uint8).view(len(gate_up), width), scales
