"""Device code of sparse latent attention: a run of one query's positions, and the join of such runs."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, float32_of, rounded_to

_WIDTH = tl.constexpr(256)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _operand(x):
    """What a product takes: the interpreter knows no bfloat16."""
    if INTERPRETED:
        return float32_of(x)
    else:
        return x


@triton.jit(do_not_specialize=["tokens", "sequences"])
def own(cu_seqlens, owners, tokens, sequences, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr):
    """The sequence int32 that owns each of `BLOCK_T` packed tokens: as many sequences end at or before it."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    found = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, sequences, BLOCK_B):
        b = base + tl.arange(0, BLOCK_B)
        ends = tl.load(cu_seqlens + 1 + b, mask=b < sequences, other=2147483647)
        found += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    tl.store(owners + token, found, mask=token < tokens)


@triton.jit
def _share(peak, total, sink_at, there, SINKS: tl.constexpr):
    """The factor on a sum of weighted values over `2^peak`: the inverse of `total`, or of it and the sink's weight."""
    if SINKS:
        sink = tl.load(sink_at, mask=there, other=0.0) * _LOG2_E
        top = tl.maximum(peak, sink)
        fade = tl.exp2(peak - top)
        return fade / (total * fade + tl.exp2(sink - top))
    else:
        return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["W", "run_width"])
def attend(
    q,
    latents,
    topk_indices,
    block_table,
    owners,
    out,
    peaks,
    totals,
    sinks,
    W,
    run_width,
    table_row,
    scale,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
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
    """Program (query, group of heads, run): `run_width` of the query's `W` positions, for `BLOCK_H` heads.

    Without SPLIT `out` is the result `[rows, H, V]`. With it `out` is float32 `[rows, runs, H, V]`, not normalised, and
    `peaks`, `totals` float32 `[rows, runs, H]`; a run without a position has total 0 and leaves its `out` unwritten.
    """
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_W)
    in_h, in_v = head < H, column < V
    # Packed tokens say whose they are; otherwise row and sequence are one.
    sequence = row
    if PACKED:
        sequence = tl.load(owners + row).to(tl.int64)
    table = block_table + sequence * table_row
    q_at = q + (row * H + head[:, None]) * R
    query = _operand(tl.load(q_at + column[None, :], mask=in_h[:, None] & in_v[None, :], other=0.0))
    if BLOCK_TAIL > 0:
        behind = V + tl.arange(0, BLOCK_TAIL)
        in_tail = behind < R
        query_tail = _operand(tl.load(q_at + behind[None, :], mask=in_h[:, None] & in_tail[None, :], other=0.0))
    begin = run * run_width
    end = tl.minimum(begin + run_width, W)
    # Lists are padded behind: nothing is done for tiles after the last position of the run.
    used = begin
    for at in tl.range(begin, end, _WIDTH, num_stages=1):
        w = at + tl.arange(0, _WIDTH)
        named = tl.load(topk_indices + row * W + w, mask=w < end, other=-1) >= 0
        used = tl.maximum(used, tl.max(tl.where(named, w + 1, 0), axis=0))
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    held = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for at in tl.range(begin, used, BLOCK_W, num_stages=STAGES):
        w = at + lane
        position = tl.load(topk_indices + row * W + w, mask=w < used, other=-1)
        block = tl.load(table + position // BLOCK_SIZE, mask=position >= 0, other=-1)
        named = block >= 0
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        latent_at = latents + slot[:, None] * R
        latent = _operand(tl.load(latent_at + column[None, :], mask=named[:, None] & in_v[None, :], other=0.0))
        logits = tl.dot(query, tl.trans(latent), input_precision="ieee")
        if BLOCK_TAIL > 0:
            tail = tl.load(latent_at + behind[None, :], mask=named[:, None] & in_tail[None, :], other=0.0)
            logits = tl.dot(query_tail, tl.trans(_operand(tail)), logits, input_precision="ieee")
        logits = tl.where(named[None, :], logits * (scale * _LOG2_E), float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        # A tile of -1 alone keeps the peak at -inf, whose difference to itself would be NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(peak - safe)
        weight = tl.exp2(logits - safe[:, None])
        total = total * fade + tl.sum(weight, axis=1)
        weight = _operand(rounded_to(weight, latents.dtype.element_ty))
        held = tl.dot(weight, latent, held * fade[:, None], input_precision="ieee")
        peak = higher
    kept = in_h[:, None] & in_v[None, :]
    if SPLIT:
        runs = tl.num_programs(2)
        at_head = (row * runs + run) * H + head
        tl.store(peaks + at_head, peak, mask=in_h)
        tl.store(totals + at_head, total, mask=in_h)
        tl.store(out + at_head[:, None] * V + column[None, :], held, mask=kept & (used > begin))
    else:
        held = held * _share(peak, total, sinks + head, in_h, SINKS)[:, None]
        at_head = row * H + head
        tl.store(out + at_head[:, None] * V + column[None, :], rounded_to(held, out.dtype.element_ty), mask=kept)


@triton.jit
def join(
    parts,
    peaks,
    totals,
    sinks,
    out,
    SINKS: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (query, head): the runs of `attend` as one softmax; zeros where no run has a position."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    run, column = tl.arange(0, BLOCK_RUNS), tl.arange(0, BLOCK_V)
    at = (row * RUNS + run) * H + head
    total = tl.load(totals + at, mask=run < RUNS, other=0.0)
    peak = tl.load(peaks + at, mask=run < RUNS, other=float("-inf"))
    # A total of NaN is a run too.
    written = total != 0.0
    highest = tl.max(tl.where(written, peak, float("-inf")), axis=0)
    share = tl.where(written, tl.exp2(peak - highest), 0.0)
    whole = tl.sum(tl.where(written, total * share, 0.0), axis=0)
    part = tl.load(parts + at[:, None] * V + column[None, :], mask=written[:, None] & (column < V)[None, :], other=0.0)
    result = tl.sum(part * share[:, None], axis=0) * _share(highest, whole, sinks + head, True, SINKS)
    tl.store(out + (row * H + head) * V + column, rounded_to(result, out.dtype.element_ty), mask=column < V)
