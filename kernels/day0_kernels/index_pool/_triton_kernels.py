"""The pools that a packed call completes and the tokens it leaves over; what to launch is the launcher's business."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_packed import sequence_of_part
from day0_kernels.triton_rounding import float32_of, rounded_to


@triton.jit(do_not_specialize=["sequences", "table_row"])
def pool_kernel(
    keys,
    gates,
    ape,
    tail,
    pool_cache,
    state_slots,
    block_table,
    cu_seqlens,
    start_positions,
    sequences,
    table_row,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (part of TOKENS tokens): the pools whose last token is in the part, and, of a first part, the new tail.

    Only the first part of a sequence reads its tail, for the pool that was begun earlier. It also writes the tail, when
    it has read it: no other program touches the slot.
    """
    sequence, begin, end, first = sequence_of_part(cu_seqlens, sequences, tl.program_id(0), TOKENS)
    slot = tl.load(state_slots + sequence).to(tl.int64)
    if (first < end) & (slot >= 0):
        start = tl.load(start_positions + sequence)
        stop = start + end - begin
        member = tl.arange(0, P_PAD)[:, None]
        column = tl.arange(0, D_PAD)[None, :]
        inside = (member < P) & (column < D)
        tail_at = tail + slot * (P * 2 * D) + member * (2 * D) + column
        shift = float32_of(tl.load(ape + member * D + column, mask=inside, other=0.0))
        here = start + first - begin
        last = here + (P - 1) - here % P
        for _ in range(TOKENS // P + 1):
            if (last < here + TOKENS) & (last < stop):
                position = last - (P - 1) + member
                new = inside & (position >= start)
                old = inside & (position < start)
                row = (begin + position - start).to(tl.int64) * D + column
                key = float32_of(tl.load(keys + row, mask=new, other=0.0))
                key += float32_of(tl.load(tail_at, mask=old, other=0.0))
                logit = float32_of(tl.load(gates + row, mask=new, other=0.0))
                logit += float32_of(tl.load(tail_at + D, mask=old, other=0.0))
                logit = tl.where(member < P, logit + shift, float("-inf"))
                weight = tl.exp(logit - tl.max(logit, 0)[None, :])
                pooled = tl.sum(weight * key, 0) / tl.sum(weight, 0)
                block = tl.load(block_table + sequence.to(tl.int64) * table_row + last // BLOCK_SIZE).to(tl.int64)
                place = block * (BLOCK_SIZE // P) + last % BLOCK_SIZE // P
                columns = tl.arange(0, D_PAD)
                made = rounded_to(pooled, pool_cache.dtype.element_ty)
                tl.store(pool_cache + place * D + columns, made, mask=columns < D)
            last += P
        if first == begin:
            # All threads have read the old tail before any of them writes the new one.
            tl.debug_barrier()
            position = stop - stop % P + member
            rest = inside & (position >= start) & (position < stop)
            row = (begin + position - start).to(tl.int64) * D + column
            key = float32_of(tl.load(keys + row, mask=rest, other=0.0))
            gate = float32_of(tl.load(gates + row, mask=rest, other=0.0))
            tl.store(tail_at, rounded_to(key, tail.dtype.element_ty), mask=rest)
            tl.store(tail_at + D, rounded_to(gate, tail.dtype.element_ty), mask=rest)
