"""One step of the gated delta rule for a tile of value columns, in place; it does not know how tiles are chosen."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, float32_of, rounded_to


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _column_sums(a, b):
    """Sums over the rows of two tiles at once; the interpreter takes a function of its own element by element."""
    if INTERPRETED:
        return tl.sum(a, axis=0), tl.sum(b, axis=0)
    else:
        return tl.reduce((a, b), 0, _add_two)


@triton.jit
def decode_step(
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
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    g_channel,
    beta_row,
    beta_head,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (sequence, head, tile): reads and writes `state[slot, head, :, tile]` float32 once, in place.

    `out` is contiguous `[B, H, V]`; `*_row`, `*_head`, `g_channel` are strides in elements (`g_channel` 0 is a gate
    per head). The result is `q^T (exp(g) S) + (q . k) delta`, which needs no second pass over the new state.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    column = (program % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = program // TILES % HEADS
    row = (program // (TILES * HEADS)).to(tl.int64)
    channel = tl.arange(0, BLOCK_K)
    in_k, in_v = channel < K, column < V
    slot = tl.load(state_slots + row).to(tl.int64)
    out_at = out + (row * HEADS + head) * V + column
    if slot < 0:
        tl.store(out_at, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=in_v)
    else:
        held_at = state + ((slot * HEADS + head) * K + channel[:, None]) * V + column[None, :]
        in_tile = in_k[:, None] & in_v[None, :]
        held = tl.load(held_at, mask=in_tile, other=0.0, eviction_policy="evict_first")
        query = float32_of(tl.load(q + row * q_row + head * q_head + channel, mask=in_k, other=0.0))
        key = float32_of(tl.load(k + row * k_row + head * k_head + channel, mask=in_k, other=0.0))
        gate = float32_of(tl.load(g + row * g_row + head * g_head + channel * g_channel, mask=in_k, other=0.0))
        value = float32_of(tl.load(v + row * v_row + head * v_head + column, mask=in_v, other=0.0))
        rate = float32_of(tl.load(beta + row * beta_row + head * beta_head))
        held = held * tl.exp(gate)[:, None]
        # Norms are applied to the sums, so that nothing waits for them but the last step.
        squared_q, squared_k, both = tl.reduce((query * query, key * key, query * key), 0, _add_three)
        of_key, of_query = _column_sums(held * key[:, None], held * query[:, None])
        norm_k = tl.sqrt(squared_k + l2norm_eps)
        delta = (value - of_key / norm_k) * rate / norm_k
        result = (of_query + both * delta) * (scale / tl.sqrt(squared_q + l2norm_eps))
        tl.store(held_at, held + key[:, None] * delta[None, :], mask=in_tile, eviction_policy="evict_first")
        tl.store(out_at, rounded_to(result, out.dtype.element_ty), mask=in_v)
