"""Device code of sparse latent attention over an FP8 cache: a run of one query's positions.

Owners of packed tokens and the join of runs are those of `sparse_mla`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, float32_of, rounded_to

_WIDTH = tl.constexpr(256)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Of codes that share a scale, and of the words they are read in.
_GROUP = tl.constexpr(128)
_WORDS = tl.constexpr(32)


@triton.jit
def _operand(x):
    """What a product takes: the interpreter knows no bfloat16."""
    if INTERPRETED:
        return float32_of(x)
    else:
        return x


@triton.jit
def _code_of(word, byte: tl.constexpr):
    code = (word >> (8 * byte)) & 0xFF
    value = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # The interpreter takes NaN for 480.
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _codes_of(word):
    """Float32 of the four e4m3 codes of an int32, lowest byte first."""
    if INTERPRETED:
        return _code_of(word, 0), _code_of(word, 1), _code_of(word, 2), _code_of(word, 3)
    else:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high, a, b, c, d;
                .reg .b32 lower, upper;
                mov.b32 {low, high}, $4;
                cvt.rn.f16x2.e4m3x2 lower, low;
                cvt.rn.f16x2.e4m3x2 upper, high;
                mov.b32 {a, b}, lower;
                mov.b32 {c, d}, upper;
                cvt.f32.f16 $0, a;
                cvt.f32.f16 $1, b;
                cvt.f32.f16 $2, c;
                cvt.f32.f16 $3, d;
            }
            """,
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _widened(words, factor, BLOCK_W: tl.constexpr, V: tl.constexpr, dtype: tl.constexpr):
    """Latents `[BLOCK_W, V]`: codes `words` int32 `[BLOCK_W, V / 4]` times `factor` float32 `[BLOCK_W, V / 128]`."""
    a, b, c, d = _codes_of(words)
    codes = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK_W, V // _GROUP, _GROUP])
    return tl.reshape(rounded_to(codes * factor[:, :, None], dtype), [BLOCK_W, V])


@triton.jit
def _slots(topk_indices, table, at, end, BLOCK_W: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Slots int32 of positions `at` on, -1 where there is none."""
    w = at + tl.arange(0, BLOCK_W)
    position = tl.load(topk_indices + w, mask=w < end, other=-1)
    block = tl.load(table + position // BLOCK_SIZE, mask=position >= 0, other=-1)
    return tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@triton.jit(do_not_specialize=["W", "run_width", "once"])
def attend(
    q,
    words,
    scales,
    tails,
    topk_indices,
    block_table,
    owners,
    out,
    peaks,
    totals,
    W,
    run_width,
    table_row,
    once,
    softmax_scale,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program (query and group of heads, run): `run_width` of the query's `W` positions, for `BLOCK_H` heads.

    `words`, `scales` and `tails` are the cache as int32, float32 and bfloat16. Without SPLIT `out` is the result
    `[rows, H, V]`. With it `out` is float32 `[rows, runs, H, V]`, not normalised, and `peaks`, `totals` float32
    `[rows, runs, H]`; a run without a position has total 0 and leaves its `out` unwritten.

    The words of a tile are loaded a tile ahead, into registers: as bytes each would take a register of its own.
    `once` is 1. Products of queries and latents stand in loops of that length, because the compiler gives a product
    that it sees feed another one all warps along the heads, and with 64 heads both warp groups then compute all of it.
    """
    groups: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    dtype: tl.constexpr = q.dtype.element_ty
    # Groups of heads of a query run side by side, so that the second finds the latents in L2.
    row = (tl.program_id(0) // groups).to(tl.int64)
    run = tl.program_id(1)
    head = tl.program_id(0) % groups * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, V)
    in_h = head < H
    sequence = row
    if PACKED:
        sequence = tl.load(owners + row).to(tl.int64)
    table = block_table + sequence * table_row
    chosen = topk_indices + row * W
    # Not in the words of the result's addresses, or the compiler keeps them through the loop for both.
    q_at = q + row * (H * R) + (head * R)[:, None]
    query = _operand(tl.load(q_at + column[None, :], mask=in_h[:, None], other=0.0))
    if BLOCK_TAIL > 0:
        behind = tl.arange(0, BLOCK_TAIL)
        in_tail = (behind < R - V)[None, :]
        query_tail = _operand(tl.load(q_at + V + behind[None, :], mask=in_h[:, None] & in_tail, other=0.0))
    begin = run * run_width
    end = tl.minimum(begin + run_width, W)
    # Lists are padded behind: nothing is done for tiles after the last position of the run.
    used = begin
    for at in tl.range(begin, end, _WIDTH, num_stages=1):
        w = at + tl.arange(0, _WIDTH)
        named = tl.load(chosen + w, mask=w < end, other=-1) >= 0
        used = tl.maximum(used, tl.max(tl.where(named, w + 1, 0), axis=0))
    word_at = words + tl.arange(0, V // 4)[None, :]
    scale_at = scales + V // 4 + tl.arange(0, V // _GROUP)[None, :]
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    held = tl.zeros([BLOCK_H, V], tl.float32)
    slot = _slots(chosen, table, begin, used, BLOCK_W, BLOCK_SIZE)
    place = (slot.to(tl.int64) * (ROW_BYTES // 4))[:, None]
    ahead = tl.load(word_at + place, mask=(slot >= 0)[:, None], other=0)
    factor = tl.load(scale_at + place, mask=(slot >= 0)[:, None], other=0.0)
    for at in tl.range(begin, used, BLOCK_W, num_stages=1):
        named = slot >= 0
        logits = tl.zeros([BLOCK_H, BLOCK_W], tl.float32)
        if BLOCK_TAIL > 0:
            place = (slot.to(tl.int64) * (ROW_BYTES // 2) + (V + V // _WORDS) // 2)[:, None]
            tail = tl.load(tails + place + behind[None, :], mask=named[:, None] & in_tail, other=0.0)
            tail = _operand(rounded_to(float32_of(tail), dtype))
        latent = _operand(_widened(ahead, factor, BLOCK_W, V, dtype))
        slot = _slots(chosen, table, at + BLOCK_W, used, BLOCK_W, BLOCK_SIZE)
        if BLOCK_TAIL > 0:
            beside = tl.zeros([BLOCK_H, BLOCK_W], tl.float32)
            for _ in tl.range(0, once, num_stages=1):
                beside = tl.dot(query_tail, tl.trans(tail), beside, input_precision="ieee")
            for _ in tl.range(0, once, num_stages=1):
                logits = tl.dot(query, tl.trans(latent), logits, input_precision="ieee")
            logits += beside
        else:
            for _ in tl.range(0, once, num_stages=1):
                logits = tl.dot(query, tl.trans(latent), logits, input_precision="ieee")
        place = (slot.to(tl.int64) * (ROW_BYTES // 4))[:, None]
        ahead = tl.load(word_at + place, mask=(slot >= 0)[:, None], other=0)
        factor = tl.load(scale_at + place, mask=(slot >= 0)[:, None], other=0.0)
        logits = tl.where(named[None, :], logits * (softmax_scale * _LOG2_E), float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        # A tile of -1 alone keeps the peak at -inf, whose difference to itself would be NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(peak - safe)
        weight = tl.exp2(logits - safe[:, None])
        total = total * fade + tl.sum(weight, axis=1)
        weight = _operand(rounded_to(weight, dtype))
        held = tl.dot(weight, latent, held * fade[:, None], input_precision="ieee")
        peak = higher
    if SPLIT:
        at_head = (row * tl.num_programs(1) + run) * H + head
        tl.store(peaks + at_head, peak, mask=in_h)
        tl.store(totals + at_head, total, mask=in_h)
        tl.store(out + at_head[:, None] * V + column[None, :], held, mask=in_h[:, None] & (used > begin))
    else:
        held = held * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        at_head = row * H + head
        tl.store(out + at_head[:, None] * V + column[None, :], rounded_to(held, dtype), mask=in_h[:, None])
