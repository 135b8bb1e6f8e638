"""Device code of index selection's choice among a prefill's scores: a gate, the candidates above it, the exact best.

It does not know how scores are made. No score is NaN or -0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.index_select._triton_prefill import owner

# Neighbouring scores a sample takes together: 32 bytes, what memory reads at once.
_TOGETHER = tl.constexpr(8)
_LOWEST = tl.constexpr(0x007FFFFF)
_BEYOND = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _order_of(bits):
    """uint32 that orders as the float32 of these int32 bits does; that of -inf is `_LOWEST`."""
    return ((bits >> 31) | -2147483648).to(tl.uint32, bitcast=True) ^ bits.to(tl.uint32, bitcast=True)


@triton.jit
def _score_of(order):
    """The float32 that has an order from `_LOWEST` on."""
    bits = tl.where((order >> 31) == 1, order ^ 0x80000000, order ^ 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _at_least(orders, low, wanted, enough):
    """Looks for a level that `wanted` to `enough` of `orders` (uint32) reach, or the highest that `wanted` reach.

    `low` is a level that at least `wanted` reach. Returns (level, how many reach it, lowest level found that fewer
    reach, how many reach that). Guesses by proportion and halving take turns.
    """
    high = tl.max(orders, axis=0) + 1
    reached, beyond = tl.sum((orders >= low).to(tl.int32), axis=0), 0
    turn = 0
    while (reached > enough) & (high - low > 1):
        span = high - low
        share = (reached - wanted).to(tl.float32) / (reached - beyond).to(tl.float32)
        guess = tl.maximum(tl.minimum((share * span.to(tl.float32)).to(tl.uint32), span - 1), 1)
        middle = low + tl.where(turn == 0, guess, span // 2)
        count = tl.sum((orders >= middle).to(tl.int32), axis=0)
        passes = count >= wanted
        low, reached = tl.where(passes, middle, low), tl.where(passes, count, reached)
        high, beyond = tl.where(passes, high, middle), tl.where(passes, beyond, count)
        turn = 1 - turn
    return low, reached, high, beyond


@triton.jit
def _sampled_gate(scores_at, pools, wanted, SAMPLE: tl.constexpr):
    """A level that a few more than `wanted` of `pools` scores are likely to reach, from a sample spread over them."""
    RUNS: tl.constexpr = SAMPLE // _TOGETHER
    lane = tl.arange(0, SAMPLE)
    at = ((lane // _TOGETHER).to(tl.int64) * (pools // _TOGETHER) // RUNS).to(tl.int32) * _TOGETHER + lane % _TOGETHER
    orders = _order_of(tl.load(scores_at + at).to(tl.int32, bitcast=True))
    expected = wanted.to(tl.float32) * SAMPLE / pools
    # Four standard deviations to be on the safe side; where it is not, the pass over the scores says so.
    rank = tl.minimum(expected + 4.0 * tl.sqrt(expected) + 2.0, SAMPLE).to(tl.int32)
    level, _, _, _ = _at_least(orders, tl.min(orders, axis=0), rank, rank + rank // 16)
    return level


@triton.jit
def _load_tile(pairs_at, at, pools, LANES: tl.constexpr, PARTIAL: tl.constexpr):
    """The scores of `16 * LANES` pools from `at` on as int64 `[LANES, 8]`, a row a lane's run."""
    pair = at // 2 + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if PARTIAL:
        return tl.load(pairs_at + pair, mask=2 * pair < pools, other=0)
    else:
        return tl.load(pairs_at + pair)


@triton.jit
def _reach(pair, pool, pools, gate, PARTIAL: tl.constexpr):
    """Whether the scores of `pool` (even) and of the one after it reach the gate, as 0 or 1."""
    low = pair.to(tl.int32).to(tl.float32, bitcast=True) >= gate
    high = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True) >= gate
    if PARTIAL:
        low, high = low & (pool < pools), high & (pool + 1 < pools)
    return low, high


@triton.jit
def _gather_tile(
    tile, at, pools, gate, count, found_at, LANES: tl.constexpr, MOST: tl.constexpr, PARTIAL: tl.constexpr
):
    """`_gather` of a loaded tile; a whole one looks at no bound. Returns the new count."""
    # Memory is read in whole rows; the splits hand each thread its run, so that one scan orders what all write.
    even, odd = tl.split(tl.reshape(tile, [LANES, 2, 2, 2]))
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    p0, p4 = tl.split(even_low)
    p2, p6 = tl.split(even_high)
    p1, p5 = tl.split(odd_low)
    p3, p7 = tl.split(odd_high)
    run = (p0, p1, p2, p3, p4, p5, p6, p7)
    first = at + tl.arange(0, LANES) * 16
    mine = tl.zeros([LANES], tl.int32)
    for i in tl.static_range(8):
        low, high = _reach(run[i], first + 2 * i, pools, gate, PARTIAL)
        mine += low.to(tl.int32) + high.to(tl.int32)
    # Beyond MOST one tile after the other lands behind the candidates, in room for a tile.
    slot = tl.minimum(count, MOST) + tl.cumsum(mine, 0) - mine
    for i in tl.static_range(8):
        pool = first + 2 * i
        low, high = _reach(run[i], pool, pools, gate, PARTIAL)
        tl.store(found_at + slot, (run[i] << 32) | pool.to(tl.int64), mask=low)
        slot += low.to(tl.int32)
        tl.store(found_at + slot, (run[i] & -4294967296) | (pool + 1).to(tl.int64), mask=high)
        slot += high.to(tl.int32)
    return count + tl.sum(mine, axis=0)


@triton.jit
def _gather(pairs_at, pools, gate, found_at, LANES: tl.constexpr, MOST: tl.constexpr):
    """Writes (score, pool) of the pools whose score reaches `gate`, ascending, the first MOST; how many reach it."""
    TILE: tl.constexpr = 16 * LANES
    whole = pools // TILE * TILE
    count = 0
    if whole > 0:
        tile = _load_tile(pairs_at, 0, pools, LANES, False)
        for at in range(0, whole, TILE):
            following = _load_tile(pairs_at, tl.minimum(at + TILE, whole - TILE), pools, LANES, False)
            count = _gather_tile(tile, at, pools, gate, count, found_at, LANES, MOST, False)
            tile = following
    if whole < pools:
        tile = _load_tile(pairs_at, whole, pools, LANES, True)
        count = _gather_tile(tile, whole, pools, gate, count, found_at, LANES, MOST, True)
    return count


@triton.jit
def _write(out_at, order, pool, inside, level, room, written, equals, P: tl.constexpr):
    """Positions of the pools above `level` and of its first `room` equals; `written` and `equals` came before."""
    above, equal = (inside & (order > level)).to(tl.int32), (inside & (order == level)).to(tl.int32)
    # Both counts in one scan: a tile has at most 2^14 pools.
    packed = above + (equal << 16)
    before = tl.cumsum(packed, 0) - packed
    equal_before = equals + (before >> 16)
    chosen = (above == 1) | ((equal == 1) & (equal_before < room))
    rank = written + (before & 0xFFFF) + tl.minimum(equal_before, room)
    for member in tl.static_range(P):
        tl.store(out_at + rank * P + member, pool * P + member, mask=chosen)
    total = tl.sum(packed, axis=0)
    return written + (total & 0xFFFF), equals + (total >> 16)


@triton.jit(do_not_specialize=["first_token", "sequences", "W", "chosen_pools"])
def choose_queries(
    scores,
    score_pairs,
    found,
    found_halves,
    cu_seqlens,
    start_positions,
    out,
    first_token,
    sequences,
    scores_row,
    W,
    chosen_pools,
    P: tl.constexpr,
    ALWAYS_TAIL: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Program (token): positions of the `chosen_pools` highest pools, ascending, ties to the lowest; tail; -1.

    The gate is a level that at least `chosen_pools` and at most MOST pools reach; a sample finds it nearly always at
    once, bisection always. Where more than MOST equals lie at the level of the choice itself, the scores are gone over
    once more. `score_pairs` are the scores as int64, `found` is scratch int64 for `MOST + 16 * LANES` candidates
    a token and `found_halves` the same as int32.
    """
    row = tl.program_id(0).to(tl.int64)
    token = first_token + tl.program_id(0)
    b = owner(cu_seqlens, sequences, token)
    length = tl.load(start_positions + b) + token - tl.load(cu_seqlens + b) + 1
    pools = length // P
    kept = tl.minimum(pools, chosen_pools)
    out_at = out + (first_token + row) * W
    lane = tl.arange(0, TILE)
    begin = kept * P
    tail = length - pools * P
    all_chosen = pools <= chosen_pools
    for at in range(0 if all_chosen else begin // TILE * TILE, W, TILE):
        column = at + lane
        step = column - begin
        position = tl.full([TILE], -1, tl.int32)
        if ALWAYS_TAIL:
            position = tl.where(step < tail, pools * P + step, -1)
        position = tl.where(step < 0, column, position)
        tl.store(out_at + column, position, mask=(column < W) & ((step >= 0) | all_chosen))
    if (pools > chosen_pools) & (kept > 0):
        scores_at, pairs_at = scores + row * scores_row, score_pairs + row * (scores_row // 2)
        ROOM: tl.constexpr = MOST + 16 * LANES
        found_at, halves_at = found + row * ROOM, found_halves + row * (2 * ROOM)
        low, high, beyond = tl.full([], _LOWEST, tl.uint32), tl.full([], _BEYOND, tl.uint32), 0
        gate = low
        if pools > MOST:
            gate = _sampled_gate(scores_at, pools, kept, MOST)
        stride = tl.full([], 1 << 18, tl.uint32)
        count = 0
        searching, untried = True, True
        while searching:
            count = _gather(pairs_at, pools, _score_of(gate), found_at, LANES, MOST)
            if count < kept:
                high, beyond = gate, count
            else:
                low = gate
            searching = ((count < kept) & (gate > _LOWEST)) | ((count > MOST) & (high - low > 1))
            # A gate that missed did so by little, or lies on a level of many equals: what is just above it tells.
            step = tl.maximum(tl.minimum(stride, (high - low) // 2), 1)
            gate = tl.where(count < kept, high - step, low + tl.where(untried, 1, step))
            stride = tl.where(stride < 1 << 30, stride * 4, stride)
            untried = False
            tl.debug_barrier()
        written, equals = 0, 0
        if count <= MOST:
            every = tl.arange(0, MOST)
            bits = tl.load(halves_at + 2 * every + 1, mask=every < count, other=-1)
            orders = tl.where(every < count, _order_of(bits), 0).to(tl.uint32)
            level, reached, _, fewer = _at_least(orders, low, kept, kept)
            room = kept - fewer
            if reached == kept:
                # No tie is cut: all that reach the level are chosen, as those above the one below it.
                level -= 1
                room = 0
            for at in range(0, count, TILE):
                slot = at + lane
                inside = slot < count
                order = _order_of(tl.load(halves_at + 2 * slot + 1, mask=inside, other=0))
                pool = tl.load(halves_at + 2 * slot, mask=inside, other=0)
                written, equals = _write(out_at, order, pool, inside, level, room, written, equals, P)
        else:
            for at in range(0, pools, TILE):
                pool = at + lane
                order = _order_of(tl.load(scores_at + pool, mask=pool < pools, other=0.0).to(tl.int32, bitcast=True))
                written, equals = _write(out_at, order, pool, pool < pools, low, kept - beyond, written, equals, P)
