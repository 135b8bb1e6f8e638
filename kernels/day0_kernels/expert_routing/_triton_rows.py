"""Device code of sorting rows by expert and of the weighted way back; a stable count, no atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import float32_of, rounded_to


@triton.jit
def _owner(ids, at, N, E: tl.constexpr):
    """Expert of each entry, E where it is no expert's, and -1 behind the last entry."""
    held = tl.load(ids + at, mask=at < N, other=0)
    return tl.where(at < N, tl.where((held < 0) | (held >= E), E, held), -1)


@triton.jit
def _ranks(ids, owner, begin, N, E: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Number of each entry of a chunk among those of its expert."""
    lanes = tl.arange(0, BLOCK)[:, None]
    rank = tl.zeros((BLOCK,), tl.int32)
    for piece in tl.range(BLOCK // PIECE):
        others = piece * PIECE + tl.arange(0, PIECE)
        earlier = (owner[:, None] == _owner(ids, begin + others, N, E)[None, :]) & (others[None, :] < lanes)
        rank += tl.sum(earlier.to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["N"])
def count_kernel(ids, ranks, counts, N, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Of a chunk of `BLOCK` entries: how many each expert has, and each entry's number among those of its expert."""
    begin = tl.program_id(0) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    owner = _owner(ids, at, N, E)
    tl.store(ranks + at, _ranks(ids, owner, begin, N, E, BLOCK, PIECE), mask=at < N)
    count = tl.histogram(tl.maximum(owner, 0), E_PAD, mask=at < N)
    tl.store(counts + tl.program_id(0) * E_PAD + tl.arange(0, E_PAD), count)


@triton.jit(do_not_specialize=["N", "chunks"])
def place_kernel(
    ids,
    ranks,
    counts,
    expert_offsets,
    spots,
    places,
    N,
    chunks,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Row of each entry of a chunk: `spots`, and `places` with -1 for entries of no expert, which lie last.

    Without `counts` and `ranks` there is one chunk, and its program finds them itself.
    """
    mine = tl.program_id(0)
    experts = tl.arange(0, E_PAD)
    begin = mine * BLOCK
    at = begin + tl.arange(0, BLOCK)
    owner = _owner(ids, at, N, E)
    before = tl.zeros((E_PAD,), tl.int32)
    if counts is None:
        rank = _ranks(ids, owner, begin, N, E, BLOCK, PIECE)
        total = tl.histogram(tl.maximum(owner, 0), E_PAD, mask=at < N)
    else:
        rank = tl.load(ranks + at, mask=at < N, other=0)
        total = tl.zeros((E_PAD,), tl.int32)
        for step in tl.range(0, chunks, STEP):
            chunk = (step + tl.arange(0, STEP))[:, None]
            # Whole runs of 16 columns are read at once.
            wanted = (chunk < chunks) & (experts < (E + 16) // 16 * 16)[None, :]
            held = tl.load(counts + chunk * E_PAD + experts[None, :], mask=wanted, other=0)
            total += tl.sum(held, 0)
            before += tl.sum(tl.where(chunk < mine, held, 0), 0)
    first = tl.cumsum(total, 0) - total
    if mine == 0:
        tl.store(expert_offsets + experts, first, mask=experts <= E)
    spot = tl.gather(first + before, tl.maximum(owner, 0), 0) + rank
    tl.store(spots + at, spot, mask=at < N)
    tl.store(places + at, tl.where(owner == E, -1, spot), mask=at < N)


@triton.jit
def spread_kernel(x, spots, places, rows, D: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """A token's row, as integers, to its K rows; zeros where it has no expert."""
    token = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    held = tl.load(x + token * D + columns, mask=columns < D, other=0)
    k = tl.arange(0, K_PAD)
    spot = tl.load(spots + token * K + k, mask=k < K, other=0).to(tl.int64)
    place = tl.load(places + token * K + k, mask=k < K, other=-1)[:, None]
    tl.store(rows + spot[:, None] * D + columns, tl.where(place < 0, 0, held), mask=(columns < D) & (k < K)[:, None])


@triton.jit
def gather_kernel(rows, topk_weights, places, out, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """The weighted sum of a token's K rows, in float32 and in the order of k."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        weight = tl.load(topk_weights + token * K + k)
        held = float32_of(tl.load(rows + place * D + columns, mask=(columns < D) & (place >= 0), other=0.0))
        total = tl.where(place >= 0, total + weight * held, total)
    tl.store(out + token * D + columns, rounded_to(total, out.dtype.element_ty), mask=columns < D)
