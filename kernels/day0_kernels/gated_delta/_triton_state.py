"""Carries the delta state through the chunks of a sequence; it does not know how their terms were made.

With S^T `[V, K]` the state and v^T `[V, 16]` the values, per chunk (terms as in `_triton_chunk.py`):

    [rest | ahead] = [v^T | 0] + S^T [-enter | reach]^T
    [new  | add]   = rest [solve | within solve]^T          out^T = scale (ahead + add)
    S^T            = S^T fade + new leave

Transposed, what the last product made is the left operand of the next: it goes from accumulator to operand in
registers. Three products a chunk follow one another, and their latency is what a long sequence costs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.gated_delta._triton_chunk import CHUNK, product
from day0_kernels.triton_packed import first_part
from day0_kernels.triton_rounding import float32_of, rounded_to


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of `[ROWS, 2 * COLUMNS]`."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS]), (0, 2, 1)))


@triton.jit
def state_pass(
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
    v_row,
    v_head,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Program (sequence, head, tile of value columns): its chunks in order, `state[slot, head, :, tile]` in place.

    Unless EXACT, a state or value beyond 65,504 becomes infinite and one below 2^-14 has an error of up to 2^-25, since
    operands are float16. No scaling by what the call holds: the bits would then depend on where a sequence is cut.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    column = (program % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = program // TILES % HEADS
    sequence = program // (TILES * HEADS)
    i = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    in_v = column < V
    begin = tl.load(cu_seqlens + sequence)
    tokens = tl.load(cu_seqlens + sequence + 1) - begin
    slot = tl.load(state_slots + sequence).to(tl.int64)
    chunks = tl.cdiv(tokens, CHUNK)
    out_at = out + ((begin + i).to(tl.int64)[:, None] * HEADS + head) * V + column[None, :]
    if slot < 0:
        for chunk in range(0, chunks):
            inside = (i < tokens - chunk * CHUNK)[:, None] & in_v[None, :]
            tl.store(out_at, tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty), mask=inside)
            out_at += CHUNK * HEADS * V
    elif tokens > 0:
        held_at = state + ((slot * HEADS + head) * K + channel[None, :]) * V + column[:, None]
        in_state = in_v[:, None] & (channel < K)[None, :]
        held = tl.load(held_at, mask=in_state, other=0.0)
        number = first_part(sequence, begin, CHUNK).to(tl.int64) * HEADS + head
        pair_at = pair + (number * 2 * CHUNK + tl.arange(0, 2 * CHUNK))[:, None] * BLOCK_K + channel[None, :]
        leave_at = leave + (number * CHUNK + i)[:, None] * BLOCK_K + channel[None, :]
        mix_at = mix + (number * 2 * CHUNK + tl.arange(0, 2 * CHUNK))[:, None] * CHUNK + i[None, :]
        fade_at = fade + number * BLOCK_K + channel
        # The values are the left half of the accumulator of the first product, whose right operand has -enter.
        wide = tl.arange(0, 2 * CHUNK)
        v_at = v + (begin + wide).to(tl.int64)[None, :] * v_row + head * v_head + column[:, None]
        in_half = in_v[:, None] & (wide < CHUNK)[None, :]
        # One chunk ahead: the compiler has the loads of operands in flight, but not these.
        fading = tl.load(fade_at)
        value = tl.load(v_at, mask=in_half & (wide < tokens)[None, :], other=0.0)
        for chunk in range(0, chunks):
            left = tokens - chunk * CHUNK
            both = tl.trans(tl.load(pair_at))
            leaving = tl.load(leave_at)
            mixing = tl.trans(tl.load(mix_at))
            fade_at += HEADS * BLOCK_K
            v_at += CHUNK * v_row
            fading_next = tl.load(fade_at, mask=(channel >= 0) & (left > CHUNK), other=0.0)
            value_next = tl.load(v_at, mask=in_half & (wide + CHUNK < left)[None, :], other=0.0)
            # [v - S^T enter | S^T reach], then [new | what it adds to the output]. Adding to the halves of the first
            # product instead of into its accumulator leaves the assembler free to keep its steps in flight.
            rest, o = _halves(float32_of(value) + product(held, both, EXACT), BLOCK_V, CHUNK)
            new, add = _halves(product(rest, mixing, EXACT), BLOCK_V, CHUNK)
            o += add
            held = held * fading[None, :] + product(new, leaving, EXACT)
            fading, value = fading_next, value_next
            inside = (i < left)[:, None] & in_v[None, :]
            tl.store(out_at, rounded_to(tl.trans(o * scale), out.dtype.element_ty), mask=inside)
            out_at += CHUNK * HEADS * V
            pair_at += HEADS * 2 * CHUNK * BLOCK_K
            leave_at += HEADS * CHUNK * BLOCK_K
            mix_at += HEADS * 2 * CHUNK * CHUNK
        tl.store(held_at, held, mask=in_state)
