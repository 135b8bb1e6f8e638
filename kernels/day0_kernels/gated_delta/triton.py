"""The gated delta rule in Triton: prefill in chunks of 16, decode in place; it does not know how gates are made.

Accuracy: with q, k, v of 16 bits the operands of products are float16 and sums float32, with float32 all is float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("bfloat16", "float16", "float32"))

CHUNK_TOKENS = 16
LARGEST_KEY_DIM = 256
# A kernel has one configuration for every size: another order of summation would give a sequence other bits when it is
# beside others.
_PLAIN_DECODE = {"BLOCK_V": 32, "num_warps": 4}
_PLAIN_CHUNK = {"SLICE": 16, "num_warps": 1, "num_stages": 1}
_PLAIN_STATE = {"BLOCK_V": 64, "num_warps": 4, "num_stages": 2}


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    if sizes.get("K", 0) > LARGEST_KEY_DIM:
        return f"K must be at most {LARGEST_KEY_DIM}, is {sizes['K']}"
    return device_refusal(device)


def _power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


def _for_width(chosen: Mapping[str, int], value_dim: int) -> Mapping[str, int]:
    """The configuration with no wider a tile than a narrow head needs."""
    return {**chosen, "BLOCK_V": min(chosen["BLOCK_V"], _power_of_two(value_dim))}


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """ValueError where a layout is not the one the kernels read."""
    rows, heads, key_dim = k.shape
    for name, tensor, channels in (("q", q, key_dim), ("k", k, key_dim), ("v", v, v.shape[-1]), ("g", g, key_dim)):
        if tensor.shape != (rows, heads, channels):
            raise ValueError(f"{name} must be {(rows, heads, channels)}, is {tuple(tensor.shape)}")
        strides = (0, 1) if name == "g" else (1,)
        if channels > 1 and tensor.stride(2) not in strides:
            raise ValueError(
                f"{name} must have a channel stride of {' or '.join(map(str, strides))}, is {tensor.stride(2)}"
            )
    if beta.shape != (rows, heads):
        raise ValueError(f"beta must be {(rows, heads)}, is {tuple(beta.shape)}")
    if state.dtype != torch.float32 or not state.is_contiguous() or state.shape[1:] != (heads, key_dim, v.shape[-1]):
        raise ValueError(
            f"state must be contiguous float32 [states, {heads}, {key_dim}, {v.shape[-1]}], is {state.dtype} "
            f"{tuple(state.shape)} with strides {state.stride()}"
        )
    if key_dim > LARGEST_KEY_DIM:
        raise ValueError(f"K must be at most {LARGEST_KEY_DIM}, is {key_dim}")


def gated_delta_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    scale: float,
    l2norm_eps: float = 1e-6,
) -> Tensor:
    """One token per sequence, as the reference: `q`, `k`, `g [B, H, K]`, `v [B, H, V]` -> `[B, H, V]` in v's dtype.

    A gate per head (GDN) is `g` expanded over its last axis (stride 0). A state slot may occur once.
    """
    from day0_kernels.gated_delta._triton_decode import decode_step

    _check(q, k, v, g, beta, state)
    sequences, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not sequences:
        return out
    chosen = _for_width(configuration(__file__, k.device, "decode_step", key_dim, _PLAIN_DECODE), value_dim)
    decode_step[(sequences * heads * -(-value_dim // chosen["BLOCK_V"]),)](
        q,
        k,
        v,
        g,
        beta,
        state,
        state_slots,
        out,
        scale,
        l2norm_eps,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride(),
        *beta.stride(),
        HEADS=heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=_power_of_two(key_dim),
        **chosen,
    )
    return out


def gated_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    l2norm_eps: float = 1e-6,
    chunk_size: int = 64,
) -> Tensor:
    """Packed sequences, as the reference -> `[T, H, V]` in v's dtype; nothing is read back to the host.

    Cut at any multiple of 16 tokens the calls give the bits of one call: `chunk_size` only has to be such a multiple.
    """
    from day0_kernels.gated_delta._triton_chunk import chunk_terms
    from day0_kernels.gated_delta._triton_state import state_pass

    _check(q, k, v, g, beta, state)
    if chunk_size % CHUNK_TOKENS:
        raise ValueError(f"chunk_size must be a multiple of {CHUNK_TOKENS}, is {chunk_size}")
    tokens, heads, key_dim = k.shape
    value_dim, sequences = v.shape[-1], len(state_slots)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not tokens:
        return out
    exact = torch.float32 in (q.dtype, k.dtype, v.dtype)
    kind = torch.float32 if exact else torch.float16
    block_k = _power_of_two(key_dim)
    # Chunk numbers a packed call can use, whatever its lengths (triton_packed).
    numbers = tokens // CHUNK_TOKENS + sequences
    pair = torch.empty(numbers, heads, 2 * CHUNK_TOKENS, block_k, dtype=kind, device=k.device)
    leave = torch.empty(numbers, heads, CHUNK_TOKENS, block_k, dtype=kind, device=k.device)
    mix = torch.empty(numbers, heads, 2 * CHUNK_TOKENS, CHUNK_TOKENS, dtype=kind, device=k.device)
    fade = torch.empty(numbers, heads, block_k, dtype=torch.float32, device=k.device)
    chosen = configuration(__file__, k.device, "chunk_terms", key_dim, _PLAIN_CHUNK)
    chosen = {**chosen, "SLICE": min(chosen["SLICE"], block_k)}
    chunk_terms[(numbers * heads,)](
        q,
        k,
        g,
        beta,
        state_slots,
        cu_seqlens,
        pair,
        leave,
        mix,
        fade,
        sequences,
        l2norm_eps,
        *q.stride()[:2],
        *k.stride()[:2],
        *g.stride(),
        *beta.stride(),
        HEADS=heads,
        K=key_dim,
        BLOCK_K=block_k,
        SPLIT=g.dtype == torch.float32,
        EXACT=exact,
        **chosen,
    )
    chosen = _for_width(configuration(__file__, k.device, "state_pass", key_dim, _PLAIN_STATE), value_dim)
    state_pass[(sequences * heads * -(-value_dim // chosen["BLOCK_V"]),)](
        pair,
        leave,
        mix,
        fade,
        v,
        state,
        state_slots,
        cu_seqlens,
        out,
        scale,
        *v.stride()[:2],
        HEADS=heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=block_k,
        EXACT=exact,
        **chosen,
    )
    return out
