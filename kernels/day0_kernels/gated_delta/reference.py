"""Definition of the per-channel gated delta rule (KDA) in plain torch; it does not know how gates are made."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from day0_kernels.row_invariant import bmm
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

SUB_CHUNK = 16
GROUP_ELEMENTS = 1 << 24


def _unit(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def _decayed_products(rows: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """`out[.., i, j] = sum_c rows[.., i, c] * k[.., j, c] * exp(decay[.., i, c] - decay[.., j, c])` for i >= j, else 0.

    `rows`, `k` float32 and `decay` float64 (running sum of log gates) are `[G, C, K]`. No exponent is ever positive:
    blocks off the diagonal are split at the first row of the block, those on it are formed element by element. The
    memory is C * SUB_CHUNK * K for a chunk, not C * C * K.
    """
    groups, chunk, _ = k.shape
    out = k.new_zeros(groups, chunk, chunk)
    # The smaller of a gap and this is the gap on and below the diagonal and -inf above it; a masked fill with a mask
    # that is broadcast takes five times as long on a CPU.
    lower = torch.ones(SUB_CHUNK, SUB_CHUNK, dtype=torch.bool, device=k.device).tril()
    bound = torch.where(lower, torch.inf, -torch.inf)[..., None]
    for begin in range(0, chunk, SUB_CHUNK):
        end = begin + SUB_CHUNK
        here, mine = decay[:, begin:end], rows[:, begin:end]
        if begin:
            border = decay[:, begin : begin + 1]
            left = mine * (here - border).exp_().float()
            right = k[:, :begin] * (border - decay[:, :begin]).exp_().float()
            out[:, begin:end, :begin] = bmm(left, right.transpose(1, 2))
        gap = torch.minimum((here[:, :, None] - here[:, None]).float(), bound).exp_()
        gap.mul_(mine[:, :, None]).mul_(k[:, None, begin:end])
        out[:, begin:end, begin:end] = gap.sum(-1)
    return out


def _by_chunk(x: Tensor, place: Tensor, chunks: int, chunk_size: int) -> Tensor:
    """Packed `[T, H, D]` as zero-padded `[chunks * H, chunk_size, D]`."""
    padded = x.new_zeros(chunks * chunk_size, *x.shape[1:], dtype=torch.float32)
    padded[place] = x.float()
    return padded.view(chunks, chunk_size, *x.shape[1:]).transpose(1, 2).reshape(-1, chunk_size, x.shape[2])


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
    """Gated delta rule over packed sequences in chunks (WY form) -> `[T, H, V]` in v's dtype.

    `q`, `k`, `g [T, H, K]` (g is the log decay, at most 0), `v [T, H, V]`, `beta [T, H]`, `state` float32 `[N, H, K,
    V]` read and written in place at `state_slots` int32 `[B]` (-1 is padding: zeros come out, nothing is written),
    `cu_seqlens` int32 `[B + 1]`. q and k are divided by `sqrt(sum x^2 + l2norm_eps)`, q is multiplied by `scale`. Per
    token: `S = exp(g) * S; S += k (beta (v - k^T S))^T; o = S^T q`. Formula: `chunk_kimi_delta_attention`.
    """
    tokens, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    bounds = cu_seqlens.tolist()
    lengths = [last - first for first, last in pairwise(bounds)]
    out = v.new_empty(tokens, heads, value_dim)
    if not tokens:
        return out
    counts = [-(-length // chunk_size) for length in lengths]
    first_chunk = [sum(counts[:b]) for b in range(len(counts))]
    chunks = sum(counts)
    device = k.device
    place = torch.cat(
        [torch.arange(n, device=device) + c * chunk_size for n, c in zip(lengths, first_chunk, strict=True)]
    )

    # A padded position has k = 0, beta = 0 and log gate 0: it changes no state, and the sum of the log gates at the
    # end of a chunk is the one at its last real token.
    query = _by_chunk(_unit(q.float(), l2norm_eps) * scale, place, chunks, chunk_size)
    key = _by_chunk(_unit(k.float(), l2norm_eps), place, chunks, chunk_size)
    value = _by_chunk(v, place, chunks, chunk_size)
    rate = _by_chunk(beta[..., None], place, chunks, chunk_size)
    decay = _by_chunk(g, place, chunks, chunk_size).double().cumsum(1)

    update = torch.empty(chunks * heads, chunk_size, key_dim + value_dim, device=device)
    within = torch.empty(chunks * heads, chunk_size, chunk_size, device=device)
    step = max(1, GROUP_ELEMENTS // (SUB_CHUNK * SUB_CHUNK * key_dim))
    for begin in range(0, chunks * heads, step):
        part = slice(begin, begin + step)
        overlap = _decayed_products(key[part], key[part], decay[part]) * rate[part]
        within[part] = _decayed_products(query[part], key[part], decay[part])
        target = torch.cat([key[part] * decay[part].exp().float(), value[part]], -1) * rate[part]
        update[part] = torch.linalg.solve_triangular(overlap, target, upper=False, unitriangular=True)

    def by_head(x: Tensor) -> Tensor:
        return x.view(chunks, heads, *x.shape[1:])

    reach = by_head(query * decay.exp().float())
    end = decay[:, -1:]
    leave = by_head(key * (end - decay).exp_().float())
    fade = by_head(end.exp().float().transpose(1, 2))
    update, within = by_head(update), by_head(within)

    slots = state_slots.long()
    memory = state.index_select(0, slots.clamp(min=0)).float()
    result = torch.empty(chunks, heads, chunk_size, value_dim, device=device)
    for i in range(max(counts)):
        active = torch.tensor([b for b, count in enumerate(counts) if i < count], device=device)
        at = torch.tensor(first_chunk, device=device)[active] + i
        held = memory[active].flatten(0, 1)
        change = update[at].flatten(0, 1)
        fresh = change[..., key_dim:] - bmm(change[..., :key_dim], held)
        o = bmm(reach[at].flatten(0, 1), held) + bmm(within[at].flatten(0, 1), fresh)
        result[at] = o.view(-1, heads, chunk_size, value_dim)
        held = held * fade[at].flatten(0, 1) + bmm(leave[at].flatten(0, 1).transpose(1, 2), fresh)
        memory[active] = held.view(-1, heads, key_dim, value_dim)
    live = (slots >= 0).nonzero()[:, 0]
    state.index_copy_(0, slots[live], memory[live].to(state.dtype))
    out.copy_(result.transpose(1, 2).reshape(chunks * chunk_size, heads, value_dim)[place])
    return out.masked_fill_(torch.repeat_interleave(slots < 0, torch.tensor(lengths, device=device))[:, None, None], 0)


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
    """One token per sequence by the recurrence: `q`, `k`, `g [B, H, K]`, `v [B, H, V]`, `beta [B, H]` -> `[B, H, V]`.

    `state` is updated in place at `state_slots`. Formula: `recurrent_kimi_delta_attention`.
    """
    if bool((state_slots < 0).any()):
        live = (state_slots >= 0).nonzero()[:, 0]
        rows = (q[live], k[live], v[live], g[live], beta[live])
        kept = gated_delta_decode(*rows, state, state_slots[live], scale=scale, l2norm_eps=l2norm_eps)
        return torch.zeros_like(v).index_copy_(0, live, kept)
    sequences, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    slots = state_slots.long()
    query = (_unit(q.float(), l2norm_eps) * scale).view(-1, 1, key_dim)
    key = _unit(k.float(), l2norm_eps).view(-1, 1, key_dim)
    held = state.index_select(0, slots).float()
    held = held.mul_(g.float().exp()[..., None]).view(-1, key_dim, value_dim)
    delta = (v.float().reshape(-1, 1, value_dim) - bmm(key, held)) * beta.float().view(-1, 1, 1)
    held.add_(key.transpose(1, 2) * delta)
    out = bmm(query, held).view(sequences, heads, value_dim)
    state.index_copy_(0, slots, held.view(sequences, heads, key_dim, value_dim).to(state.dtype))
    return out.to(v.dtype)
