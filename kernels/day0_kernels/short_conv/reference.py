"""Definition of the short causal convolution in plain torch; it does not know what its channels are."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.packed import sequence_of_token
from day0_kernels.row_invariant import silu
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)


def _activate(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    if activation == "silu":
        return silu(x)
    raise ValueError(f"activation must be 'silu' or None, got {activation!r}")


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """Depthwise `y[t] = act(sum_j weight[:, j] * x[t - K + 1 + j])` -> `[T, C]` in x's dtype.

    `x [T, C]` packed by `cu_seqlens` int32 `[B + 1]`; `weight [C, K]`; `conv_state [N, C, K - 1]` holds the last
    inputs of each sequence at `state_slots` int32 `[B]` and is updated in place. Slot -1 is padding: zeros come out,
    nothing is written.
    """
    tokens, carried = len(x), weight.shape[1] - 1
    slots = state_slots.long()
    sequence = sequence_of_token(cu_seqlens, tokens)
    before = conv_state.index_select(0, slots.clamp(min=0)).float()
    # Each sequence is laid out behind its carried inputs, so that one shifted read serves every token.
    extended = x.new_empty(tokens + len(slots) * carried, x.shape[1], dtype=torch.float32)
    place = torch.arange(tokens, device=x.device) + (sequence + 1) * carried
    extended[place] = x.float()
    head = cu_seqlens[:-1].long() + torch.arange(len(slots), device=x.device) * carried
    tap = torch.arange(carried, device=x.device)
    extended[head[:, None] + tap] = before.transpose(1, 2)

    taps = weight.float().t()
    out = extended[place - carried] * taps[0]
    for j in range(1, carried + 1):
        out = out + extended[place - carried + j] * taps[j]
    live = (slots >= 0).nonzero()[:, 0]
    last = cu_seqlens[1:].long()[live] + live * carried
    conv_state[slots[live]] = extended[last[:, None] + tap].transpose(1, 2).to(conv_state.dtype)
    return _activate(out, activation).masked_fill_((slots < 0)[sequence][:, None], 0).to(x.dtype)


def short_conv_decode(
    x: Tensor, weight: Tensor, conv_state: Tensor, state_slots: Tensor, activation: str | None = "silu"
) -> Tensor:
    """One token per sequence: `x [B, C]` -> `[B, C]`; the bits equal those of `short_conv_prefill`."""
    if bool((state_slots < 0).any()):
        live = (state_slots >= 0).nonzero()[:, 0]
        kept = short_conv_decode(x[live], weight, conv_state, state_slots[live], activation)
        return torch.zeros_like(x).index_copy_(0, live, kept)
    slots = state_slots.long()
    window = torch.cat([conv_state.index_select(0, slots).float(), x.float()[..., None]], 2)
    products = window * weight.float()
    out = products[..., 0]
    for j in range(1, weight.shape[1]):
        out = out + products[..., j]
    conv_state.index_copy_(0, slots, window[:, :, 1:].to(conv_state.dtype))
    return _activate(out, activation).to(x.dtype)
