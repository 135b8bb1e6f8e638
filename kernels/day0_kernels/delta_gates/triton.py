"""The gates before and behind the delta rule on an NVIDIA GPU, a launch each; device code is in `_triton_kernels`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.delta_gates.reference import LINEAR_FROM
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

LARGEST_WIDTH = 1024
_BLOCK, _BLOCK_VALUES = 1024, 1024


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    if operator == "gated_norm" and sizes.get("V", 1) > LARGEST_WIDTH:
        return f"V must be at most {LARGEST_WIDTH}, is {sizes['V']}"
    return device_refusal(device)


def delta_gates(
    forget: Tensor, rate: Tensor, dt_bias: Tensor, a_log: Tensor, *, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    from day0_kernels.delta_gates._triton_kernels import gates_kernel

    tokens, heads, key_dim = forget.shape
    g = forget.new_empty(tokens, heads, key_dim, dtype=torch.float32)
    beta = rate.new_empty(tokens, heads)
    if tokens == 0:
        return g, beta
    if heads > 1 and rate.stride(1) != 1:
        rate = rate.contiguous()
    gates_kernel[(tokens, -(-heads * key_dim // _BLOCK))](
        forget.contiguous(),
        rate,
        dt_bias.float().contiguous(),
        a_log.float().contiguous(),
        g,
        beta,
        float(lower_bound or 0.0),
        LINEAR_FROM,
        rate.stride(0),
        H=heads,
        H_PAD=_power_of_two(heads),
        K=key_dim,
        BOUNDED=lower_bound is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return g, beta


def gated_norm(x: Tensor, gate: Tensor, norm_weight: Tensor, *, norm_eps: float) -> Tensor:
    """As the reference; ValueError for heads wider than the kernel."""
    from day0_kernels.delta_gates._triton_kernels import norm_kernel

    width = x.shape[2]
    if width > LARGEST_WIDTH:
        raise ValueError(f"V must be at most {LARGEST_WIDTH}, is {width}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = out.shape[0] * out.shape[1]
    if rows == 0:
        return out
    padded = _power_of_two(width)
    block = max(1, _BLOCK_VALUES // padded)
    norm_kernel[(-(-rows // block),)](
        x.contiguous(),
        gate.contiguous(),
        norm_weight.contiguous(),
        out,
        rows,
        norm_eps,
        V=width,
        V_PAD=padded,
        BLOCK_N=block,
        num_warps=4,
    )
    return out


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
