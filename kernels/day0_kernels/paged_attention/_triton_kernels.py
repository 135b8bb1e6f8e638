"""Device code of decode attention over whole paged sequences: a run of a sequence's positions, and the join of runs.

Runs begin at multiples of one width, whatever the length, so that a sequence has its bits among any others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, float32_of, rounded_to

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _operand(x):
    """What a product takes: the interpreter knows no bfloat16."""
    if INTERPRETED:
        return float32_of(x)
    else:
        return x


@triton.jit
def _slots(table, at, end, BLOCK_SIZE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Slots int64 of the `BLOCK_W` positions from `at`, a multiple of it; where there is none, any."""
    if BLOCK_SIZE % BLOCK_W == 0:
        block = tl.load(table + at // BLOCK_SIZE)
        return block.to(tl.int64) * BLOCK_SIZE + (at % BLOCK_SIZE + tl.arange(0, BLOCK_W))
    else:
        w = at + tl.arange(0, BLOCK_W)
        block = tl.load(table + w // BLOCK_SIZE, mask=w < end, other=0)
        return block.to(tl.int64) * BLOCK_SIZE + w % BLOCK_SIZE


@triton.jit
def _weighed(logits, there, peak, total, scale):
    """New peak and total, weights of a tile, and what the sums so far are multiplied with; a tile has a position."""
    logits = tl.where(there[None, :], logits * (scale * _LOG2_E), float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, axis=1))
    fade = tl.exp2(peak - higher)
    weight = tl.exp2(logits - higher[:, None])
    return higher, total * fade + tl.sum(weight, axis=1), weight, fade


@triton.jit
def attend_latents(
    q,
    latents,
    block_table,
    seq_lens,
    parts,
    peaks,
    totals,
    table_row,
    scale,
    RUN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (sequence and group of heads, run): `RUN` positions for `BLOCK_H` heads.

    Writes `parts` float32 `[B, runs, H, V]`, not normalised, and `peaks`, `totals` float32 `[B, runs, H]`; nothing for
    a run that begins behind the sequence.
    """
    groups: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // groups).to(tl.int64)
    run = tl.program_id(1)
    head = tl.program_id(0) % groups * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_W)
    in_h, in_v = head < H, column < V
    begin = run * RUN
    end = tl.minimum(begin + RUN, tl.load(seq_lens + row))
    table = block_table + row * table_row
    q_at = q + (row * H + head[:, None]) * R
    query = _operand(tl.load(q_at + column[None, :], mask=in_h[:, None] & in_v[None, :], other=0.0))
    if BLOCK_TAIL > 0:
        behind = V + tl.arange(0, BLOCK_TAIL)
        in_tail = behind < R
        query_tail = _operand(tl.load(q_at + behind[None, :], mask=in_h[:, None] & in_tail[None, :], other=0.0))
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    held = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for at in tl.range(begin, end, BLOCK_W, num_stages=STAGES):
        there = at + lane < end
        latent_at = latents + _slots(table, at, end, BLOCK_SIZE, BLOCK_W)[:, None] * R
        latent = _operand(tl.load(latent_at + column[None, :], mask=there[:, None] & in_v[None, :], other=0.0))
        logits = tl.dot(query, tl.trans(latent), input_precision="ieee")
        if BLOCK_TAIL > 0:
            tail = tl.load(latent_at + behind[None, :], mask=there[:, None] & in_tail[None, :], other=0.0)
            logits = tl.dot(query_tail, tl.trans(_operand(tail)), logits, input_precision="ieee")
        peak, total, weight, fade = _weighed(logits, there, peak, total, scale)
        weight = _operand(rounded_to(weight, latents.dtype.element_ty))
        held = tl.dot(weight, latent, held * fade[:, None], input_precision="ieee")
    if begin < end:
        at_head = (row * tl.num_programs(1) + run) * H + head
        tl.store(peaks + at_head, peak, mask=in_h)
        tl.store(totals + at_head, total, mask=in_h)
        tl.store(parts + at_head[:, None] * V + column[None, :], held, mask=in_h[:, None] & in_v[None, :])


@triton.jit
def attend_pairs(
    q,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    parts,
    peaks,
    totals,
    table_row,
    scale,
    RUN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (sequence and key head, run): `RUN` positions for the `GROUP` query heads of a key head.

    Writes as `attend_latents` does, with `H = HKV * GROUP` and `V = D`.
    """
    row = (tl.program_id(0) // HKV).to(tl.int64)
    key_head = tl.program_id(0) % HKV
    run = tl.program_id(1)
    member = tl.arange(0, BLOCK_G)
    column = tl.arange(0, D)
    lane = tl.arange(0, BLOCK_W)
    in_group = member < GROUP
    begin = run * RUN
    end = tl.minimum(begin + RUN, tl.load(seq_lens + row))
    table = block_table + row * table_row
    q_at = q + ((row * HKV + key_head) * GROUP + member[:, None]) * D
    query = _operand(tl.load(q_at + column[None, :], mask=in_group[:, None], other=0.0))
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    held = tl.zeros([BLOCK_G, D], tl.float32)
    for at in tl.range(begin, end, BLOCK_W, num_stages=STAGES):
        there = at + lane < end
        place = (_slots(table, at, end, BLOCK_SIZE, BLOCK_W) * HKV + key_head)[:, None] * D + column[None, :]
        key = _operand(tl.load(key_cache + place, mask=there[:, None], other=0.0))
        value = _operand(tl.load(value_cache + place, mask=there[:, None], other=0.0))
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        peak, total, weight, fade = _weighed(logits, there, peak, total, scale)
        weight = _operand(rounded_to(weight, value_cache.dtype.element_ty))
        held = tl.dot(weight, value, held * fade[:, None], input_precision="ieee")
    if begin < end:
        at_head = ((row * tl.num_programs(1) + run) * HKV + key_head) * GROUP + member
        tl.store(peaks + at_head, peak, mask=in_group)
        tl.store(totals + at_head, total, mask=in_group)
        tl.store(parts + at_head[:, None] * D + column[None, :], held, mask=in_group[:, None])


@triton.jit(do_not_specialize=["runs"])
def join_runs(
    parts,
    peaks,
    totals,
    seq_lens,
    out,
    runs,
    RUN: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
):
    """Program (sequence, head): the runs of a sequence as one softmax, `BLOCK_RUNS` at a time; zeros for length 0."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_RUNS)
    count = tl.cdiv(tl.load(seq_lens + row), RUN)
    peak = float("-inf")
    total = 0.0
    held = tl.zeros([BLOCK_V], tl.float32)
    for first in tl.range(0, count, BLOCK_RUNS, num_stages=1):
        run = first + lane
        there = run < count
        at = (row * runs + run) * H + head
        peak_of = tl.load(peaks + at, mask=there, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(peak_of, axis=0))
        fade = tl.exp2(peak - higher)
        share = tl.exp2(peak_of - higher)
        total = total * fade + tl.sum(tl.load(totals + at, mask=there, other=0.0) * share, axis=0)
        part_at = parts + at[:, None] * V + column[None, :]
        part = tl.load(part_at, mask=there[:, None] & (column < V)[None, :], other=0.0)
        held = held * fade + tl.sum(part * share[:, None], axis=0)
        peak = higher
    held = held / tl.where(count == 0, 1.0, total)
    tl.store(out + (row * H + head) * V + column, rounded_to(held, out.dtype.element_ty), mask=column < V)
