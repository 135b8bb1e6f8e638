"""Device code of index selection's prefill scores: a group of queries over a run of their sequence's pools."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, float32_of

_WIDTH = tl.constexpr(256)


@triton.jit
def _operand(x):
    """What a product takes: the interpreter knows no bfloat16."""
    if INTERPRETED:
        return float32_of(x)
    else:
        return x


@triton.jit
def owner(cu_seqlens, sequences, token):
    """The sequence of a packed token: as many end at or before it."""
    lane = tl.arange(0, _WIDTH)
    found = 0
    for base in range(0, sequences, _WIDTH):
        ends = tl.load(cu_seqlens + 1 + base + lane, mask=base + lane < sequences, other=2147483647)
        found += tl.sum((ends <= token).to(tl.int32), axis=0)
    return found


@triton.jit(do_not_specialize=["first_token", "end_token", "sequences", "chosen_pools"])
def score_queries(
    q,
    weights,
    keys,
    key_scales,
    block_table,
    cu_seqlens,
    start_positions,
    scores,
    first_token,
    end_token,
    sequences,
    table_row,
    scores_row,
    chosen_pools,
    scale,
    HI: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    POOLS_A_BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_HI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (group of QUERIES tokens, run of `TILES * BLOCK_P` pools): float32 scores of the pools each token sees.

    Tokens `first_token .. end_token - 1` have the rows of `scores`. Keys of a block lie one after the other; where they
    are SCALED, their float32 scales follow them. A query and a pool have one order of summation, whatever is beside
    them. Keys are the left operand and stream, the queries' heads are the columns and stay.
    """
    BLOCK_ELEMENTS: tl.constexpr = POOLS_A_BLOCK * (D + 4 if SCALED else D)
    WHOLE_BLOCKS: tl.constexpr = (BLOCK_P % POOLS_A_BLOCK == 0) & (BLOCK_D == D)
    group = first_token + tl.program_id(0) * QUERIES
    run = tl.program_id(1) * (TILES * BLOCK_P)
    member = tl.arange(0, QUERIES)
    token = group + member
    column = tl.arange(0, QUERIES * BLOCK_HI)
    head, channel, lane = column % BLOCK_HI, tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    own = (group + column // BLOCK_HI).to(tl.int64) * HI + head
    in_q, in_d = (group + column // BLOCK_HI < end_token) & (head < HI), channel < D
    query_at = q + own[None, :] * D + channel[:, None]
    query = _operand(tl.load(query_at, mask=in_q[None, :] & in_d[:, None], other=0.0))
    share = float32_of(tl.load(weights + own, mask=in_q, other=0.0)) * scale
    last_token = tl.minimum(group + QUERIES, end_token) - 1
    for b in range(owner(cu_seqlens, sequences, group), owner(cu_seqlens, sequences, last_token) + 1):
        begin, end = tl.load(cu_seqlens + b), tl.load(cu_seqlens + b + 1)
        position = tl.load(start_positions + b) - begin
        pools = (position + tl.minimum(last_token, end - 1) + 1) // P
        visible = tl.where((token >= begin) & (token < end) & (token < end_token), (position + token + 1) // P, 0)
        stop = tl.minimum(run + TILES * BLOCK_P, pools)
        if (pools <= chosen_pools) | (begin == end):
            stop = run
        table, last_unit = block_table + b * table_row, (pools - 1) // POOLS_A_BLOCK
        for at in tl.range(run, stop, BLOCK_P, num_stages=STAGES):
            pool = at + lane
            if POOLS_A_BLOCK % BLOCK_P == 0:
                block = tl.maximum(tl.load(table + at // POOLS_A_BLOCK), 0).to(tl.int64)
                in_block = at % POOLS_A_BLOCK + lane
                key_at = keys + block * BLOCK_ELEMENTS + in_block[:, None] * D + channel[None, :]
                key = tl.load(key_at, mask=in_d[None, :], other=0.0) if BLOCK_D != D else tl.load(key_at)
                if SCALED:
                    key_scale = tl.load(key_scales + block * (BLOCK_ELEMENTS // 4) + POOLS_A_BLOCK * D // 4 + in_block)
            elif WHOLE_BLOCKS:
                unit = tl.minimum(at // POOLS_A_BLOCK + tl.arange(0, BLOCK_P // POOLS_A_BLOCK), last_unit)
                block = tl.maximum(tl.load(table + unit), 0).to(tl.int64)[:, None]
                key_at = keys + block * BLOCK_ELEMENTS + tl.arange(0, POOLS_A_BLOCK * D)[None, :]
                key = tl.reshape(tl.load(key_at), [BLOCK_P, D])
                if SCALED:
                    scale_at = block * (BLOCK_ELEMENTS // 4) + (POOLS_A_BLOCK * D // 4 + tl.arange(0, POOLS_A_BLOCK))
                    key_scale = tl.reshape(tl.load(key_scales + scale_at), [BLOCK_P])
            else:
                block = tl.load(table + pool // POOLS_A_BLOCK, mask=pool < pools, other=-1)
                known, block = block >= 0, block.to(tl.int64)
                in_block = pool % POOLS_A_BLOCK
                key_at = keys + (block * BLOCK_ELEMENTS + in_block * D)[:, None] + channel[None, :]
                key = tl.load(key_at, mask=known[:, None] & in_d[None, :], other=0.0)
                if SCALED:
                    scale_at = key_scales + block * (BLOCK_ELEMENTS // 4) + POOLS_A_BLOCK * D // 4 + in_block
                    key_scale = tl.load(scale_at, mask=known, other=0.0)
            key = _operand(key)
            dots = tl.dot(key, query, input_precision="ieee")
            # NaN passes, as relu lets it: a broken row must not pass for one of score 0.
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * share[None, :]
            if BLOCK_HI != HI:
                dots = tl.where((head < HI)[None, :], dots, 0.0)
            # A thread holds every fourth pair of heads; the splits have the four that share a query meet in shared
            # memory, where scores go anyway to be stored in whole rows. A plain sum takes two exchanges a score.
            quads = tl.permute(tl.reshape(dots, [BLOCK_P, QUERIES, BLOCK_HI // 8, 4, 2]), (0, 1, 3, 2, 4))
            part = tl.sum(tl.reshape(quads, [BLOCK_P, QUERIES, 4, BLOCK_HI // 4]), axis=3)
            even, odd = tl.split(tl.reshape(part, [BLOCK_P, QUERIES, 2, 2]))
            even, odd = tl.split(even + odd)
            score = even + odd
            if SCALED:
                score = score * key_scale[:, None]
            # No NaN and no zero of another sign: the choice compares scores as they are.
            score = tl.where(score != score, float("-inf"), score) + 0.0
            score_at = scores + ((token - first_token)[None, :] * scores_row + pool[:, None])
            tl.store(score_at, score, mask=pool[:, None] < visible[None, :])
