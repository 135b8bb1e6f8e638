"""Chunked delta attention for training: the whole sequence at once, in batched products; it knows no cache.

The recurrence is upstream's `recurrent_kimi_delta_attention`. Within chunks of 32 tokens it is solved in closed form;
between chunks the state obeys `S' = A S + B`, which an associative scan evaluates in a logarithmic number of products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The gate is at least -5 a token, so exponents relative to a chunk's middle stay within ±80: finite in float32.
CHUNK_TOKENS = 32


class ShortConv(torch.autograd.Function):
    """Causal depthwise convolution `[B, L, D]` with weights float32 `[D, W]`, summed in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        width, length = weight.shape[1], x.shape[1]
        padded = F.pad(x.float(), (0, 0, width - 1, 0))
        y = padded[:, :length] * weight[:, 0]
        for tap in range(1, width):
            y.addcmul_(padded[:, tap : tap + length], weight[:, tap])
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        width, length = weight.shape[1], x.shape[1]
        padded = F.pad(x.float(), (0, 0, width - 1, 0))
        after = F.pad(grad, (0, 0, 0, width - 1))
        grad_x = grad * weight[:, width - 1]
        for tap in range(width - 1):
            shift = width - 1 - tap
            grad_x.addcmul_(after[:, shift : shift + length], weight[:, tap])
        taps = [(padded[:, tap : tap + length] * grad).sum((0, 1)) for tap in range(width)]
        return grad_x.to(x.dtype), torch.stack(taps, 1)


class UnitLowerInverse(torch.autograd.Function):
    """`(I + N)⁻¹` of strictly lower triangular float32 `[..., C, C]`, C a power of two.

    Blocks double in size each round, `X ← X - X N' X` with N' the part of N that joins two blocks. That is block
    forward substitution, so identical keys do not cancel catastrophically as they do in a power series.
    """

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, device=lower.device, dtype=lower.dtype)
        block = 1
        while block < size:
            pair, half = index // (2 * block), index // block % 2
            joins = (pair[:, None] == pair) & (half[:, None] > half)
            part = lower * joins
            inverse = inverse - (part if block == 1 else inverse @ part @ inverse)
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def states_before(step: Tensor, k_dim: int) -> Tensor:
    """State `[N, Z, K, V]` before each of N chunks, from `[A | B]` as `[N, Z, K, K + V]`; zero before the first."""
    chunks = step.shape[0]
    if chunks == 1:
        return torch.zeros_like(step[..., k_dim:])
    if chunks % 2:
        return states_before(F.pad(step, (0, 0, 0, 0, 0, 0, 0, 1)), k_dim)[:chunks]
    first, second = step.unflatten(0, (-1, 2)).unbind(1)
    second_a, second_b = second.split([k_dim, second.shape[-1] - k_dim], -1)
    both = second_a @ first
    both = both + F.pad(second_b, (k_dim, 0))
    before_first = states_before(both, k_dim)
    first_a, first_b = first.split([k_dim, first.shape[-1] - k_dim], -1)
    before_second = first_a @ before_first + first_b
    return torch.stack((before_first, before_second), 1).flatten(0, 1)


def normalise(x: Tensor) -> Tensor:
    """Upstream's `l2norm` over the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunked_delta_attention(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor) -> Tensor:
    """Output float32 `[B, L, H, V]` of q, k, log_gate `[B, L, H, K]`, v `[B, L, H, V]` and beta `[B, L, H]`.

    log_gate must be in [-5, 0]. q and k are normalised here; everything is computed in float32.
    """
    batch, length, heads, k_dim = q.shape
    pad = -length % CHUNK_TOKENS

    def chunks(x: Tensor) -> Tensor:
        """`[N, B * H, C, D]`: chunks first, so that the scan's halves are slices of the first dim."""
        x = F.pad(x, (0, 0, 0, 0, 0, pad)) if pad else x
        x = x.unflatten(1, (-1, CHUNK_TOKENS)).permute(1, 0, 3, 2, 4)
        return x.reshape(x.shape[0], batch * heads, CHUNK_TOKENS, x.shape[-1])

    q = chunks(normalise(q.float()) * k_dim**-0.5)
    k = chunks(normalise(k.float()))
    v, beta = chunks(v.float()), chunks(beta.float().unsqueeze(-1))
    total = chunks(log_gate.float()).cumsum(-2)
    middle = total[..., CHUNK_TOKENS // 2 - 1 : CHUNK_TOKENS // 2, :].detach()
    up, down = (total - middle).exp(), (middle - total).exp()
    from_start = total.exp()
    last = total[..., -1:, :]

    k_down = (k * down).transpose(-1, -2)
    lower = ((k * up) @ k_down).tril(-1) * beta
    inner = ((q * up) @ k_down).tril()
    inverse = UnitLowerInverse.apply(lower)
    # u: values less what earlier keys of the chunk hold; w: what the state before the chunk would answer.
    u_w = inverse @ torch.cat((v * beta, k * beta * from_start), -1)
    by_last = (k * (last - total).exp()).transpose(-1, -2) @ u_w
    out_u, out_w = (inner @ u_w).split([v.shape[-1], k_dim], -1)
    add, forget = by_last.split([v.shape[-1], k_dim], -1)
    step = torch.cat((torch.diag_embed(last.squeeze(-2).exp()) - forget, add), -1)
    out = out_u + (q * from_start - out_w) @ states_before(step, k_dim)

    out = out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).reshape(batch, length + pad, heads, -1)
    return out[:, :length]


def delta_layer(weights: dict[str, Tensor], x: Tensor, heads: int, lower_bound: float, eps: float) -> Tensor:
    """Upstream's `Glm5NextTextLinearAttention` of `[B, L, hidden]`, from its parameters by their names in it."""
    batch, length, _ = x.shape
    joined = torch.cat([weights[f"{part}_proj.weight"] for part in "qkv"])
    mixed = ShortConv.apply(F.linear(x, joined), weights["conv1d.weight"].squeeze(1))
    q, k, v = F.silu(mixed).to(x.dtype).view(batch, length, 3, heads, -1).unbind(2)

    forget = F.linear(F.linear(x, weights["forget_gate.f_a_proj.weight"]), weights["forget_gate.f_b_proj.weight"])
    rate = weights["forget_gate.A_log"].float().exp()[:, None]
    raw = (forget.float() + weights["forget_gate.dt_bias"].float()).view(batch, length, heads, -1)
    log_gate = lower_bound * torch.sigmoid(rate * raw)
    beta = torch.sigmoid(F.linear(x, weights["b_proj.weight"]))

    out = chunked_delta_attention(q, k, v, log_gate, beta)
    gate = F.linear(F.linear(x, weights["g_a_proj.weight"]), weights["g_b_proj.weight"])
    gate = gate.view(batch, length, heads, -1).float()
    out = F.rms_norm(out.to(x.dtype).float(), out.shape[-1:], weights["o_norm.weight"].float(), eps)
    out = (out * gate.sigmoid()).to(x.dtype).flatten(2)
    return F.linear(out, weights["o_proj.weight"])
