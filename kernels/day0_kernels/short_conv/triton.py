"""The short causal convolution on an NVIDIA GPU; device code is in `_triton_kernels`, block sizes in `sm_*.json`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

LARGEST_TAPS = 16
_PLAIN_TOKENS = {"BLOCK_T": 16, "BLOCK_C": 256, "num_warps": 4}
_PLAIN_CHANNELS = {"BLOCK_C": 256, "num_warps": 4}


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    if not 2 <= sizes.get("K", 2) <= LARGEST_TAPS:
        return f"K must be 2 to {LARGEST_TAPS}, is {sizes['K']}"
    return device_refusal(device)


def _check(x: Tensor, weight: Tensor, conv_state: Tensor, activation: str | None) -> tuple[int, int]:
    """(channels, taps); ValueError where a layout is not the one the kernels read."""
    channels, taps = weight.shape
    if x.shape[1] != channels or (channels > 1 and x.stride(1) != 1):
        raise ValueError(f"x must be [rows, {channels}] with channels together, is {tuple(x.shape)}, {x.stride()}")
    if not 2 <= taps <= LARGEST_TAPS or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [C, 2 .. {LARGEST_TAPS}], is {tuple(weight.shape)}")
    if conv_state.shape[1:] != (channels, taps - 1) or not conv_state.is_contiguous():
        raise ValueError(
            f"conv_state must be contiguous [states, {channels}, {taps - 1}], is {tuple(conv_state.shape)} with "
            f"strides {conv_state.stride()}"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    return channels, taps


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """As the reference: `x [T, C]`, `weight [C, K]`, `conv_state [N, C, K - 1]` -> `[T, C]` in x's dtype.

    Two launches that do not depend on each other: the tokens that need no carried input, and the others with the state.
    """
    from day0_kernels.short_conv._triton_kernels import convolve_heads, convolve_tokens

    channels, taps = _check(x, weight, conv_state, activation)
    tokens, sequences = len(x), len(state_slots)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    chosen = configuration(__file__, x.device, "convolve_tokens", tokens, _PLAIN_TOKENS)
    parts = tokens // chosen["BLOCK_T"] + sequences
    convolve_tokens[(parts * -(-channels // chosen["BLOCK_C"]),)](
        x,
        weight,
        state_slots,
        cu_seqlens,
        out,
        sequences,
        x.stride(0),
        C=channels,
        TAPS=taps,
        SILU=activation == "silu",
        **chosen,
    )
    chosen = configuration(__file__, x.device, "convolve_heads", sequences, _PLAIN_CHANNELS)
    convolve_heads[(sequences * -(-channels // chosen["BLOCK_C"]),)](
        x,
        weight,
        conv_state,
        state_slots,
        cu_seqlens,
        out,
        x.stride(0),
        C=channels,
        TAPS=taps,
        SILU=activation == "silu",
        SAME=x.dtype == conv_state.dtype,
        **chosen,
    )
    return out


def short_conv_decode(
    x: Tensor, weight: Tensor, conv_state: Tensor, state_slots: Tensor, activation: str | None = "silu"
) -> Tensor:
    """One token per sequence, `x [B, C]` -> `[B, C]`; products are summed in the order of `short_conv_prefill`."""
    from day0_kernels.short_conv._triton_kernels import convolve_step

    channels, taps = _check(x, weight, conv_state, activation)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    chosen = configuration(__file__, x.device, "convolve_step", len(x), _PLAIN_CHANNELS)
    convolve_step[(len(x) * -(-channels // chosen["BLOCK_C"]),)](
        x,
        weight,
        conv_state,
        state_slots,
        out,
        x.stride(0),
        C=channels,
        TAPS=taps,
        SILU=activation == "silu",
        SAME=x.dtype == conv_state.dtype,
        **chosen,
    )
    return out
