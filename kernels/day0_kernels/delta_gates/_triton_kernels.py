"""Device code of the gates before and behind the delta rule."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import float32_of, rounded_to


@triton.jit
def gates_kernel(
    forget,
    rate,
    dt_bias,
    a_log,
    g,
    beta,
    lower_bound,
    linear_from,
    rate_row,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`BLOCK` channels of a token of `forget [T, H, K]`; the first program of a token also makes its `beta [T, H]`."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = channel < H * K
    x = float32_of(tl.load(forget + token * (H * K) + channel, mask=held, other=0.0))
    x += tl.load(dt_bias + channel, mask=held, other=0.0)
    decay = tl.exp(tl.load(a_log + channel // K, mask=held, other=0.0))
    if BOUNDED:
        made = lower_bound * (1.0 / (1.0 + tl.exp(-decay * x)))
    else:
        made = -decay * tl.where(x > linear_from, x, tl.log(1.0 + tl.exp(x)))
    tl.store(g + token * (H * K) + channel, made, mask=held)
    if tl.program_id(1) == 0:
        head = tl.arange(0, H_PAD)
        step = 1.0 / (1.0 + tl.exp(-float32_of(tl.load(rate + token * rate_row + head, mask=head < H, other=0.0))))
        tl.store(beta + token * H + head, rounded_to(step, beta.dtype.element_ty), mask=head < H)


@triton.jit(do_not_specialize=["N"])
def norm_kernel(x, gate, norm_weight, out, N, norm_eps, V: tl.constexpr, V_PAD: tl.constexpr, BLOCK_N: tl.constexpr):
    """`BLOCK_N` of the N heads of all tokens, `[N, V]`."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    column = tl.arange(0, V_PAD)[None, :]
    held = (row < N) & (column < V)
    wide = float32_of(tl.load(x + row * V + column, mask=held, other=0.0))
    rated = float32_of(tl.load(gate + row * V + column, mask=held, other=0.0))
    weight = float32_of(tl.load(norm_weight + column, mask=column < V, other=0.0))
    unit = wide * tl.rsqrt(tl.sum(wide * wide, 1) / V + norm_eps)[:, None]
    made = weight * unit * (1.0 / (1.0 + tl.exp(-rated)))
    tl.store(out + row * V + column, rounded_to(made, out.dtype.element_ty), mask=held)
