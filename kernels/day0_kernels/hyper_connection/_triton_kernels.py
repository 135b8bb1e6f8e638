"""Device code of hyper-connection mixing; what to launch with which sizes is the launcher's business."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, bfloat16_of, float32_of, rounded_to


@triton.jit(do_not_specialize=["T"])
def mix_kernel(
    streams,
    fn,
    sums,
    T,
    D: tl.constexpr,
    M: tl.constexpr,
    R_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINED: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One part of the mixing product for `BLOCK_T` tokens; see `_mix`. CHAINED: it may begin while another ends."""
    if CHAINED and not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, part = tl.program_id(0) // PARTS * BLOCK_T, tl.program_id(0) % PARTS
    _mix(streams, fn, sums, T, first, part, D, M, R_PAD, SPLIT, DEPTH, BLOCK_T, BLOCK_K, STAGES)


@triton.jit(do_not_specialize=["T"])
def finish_kernel(
    streams,
    base,
    scale,
    norm_weight,
    sums,
    pre,
    post,
    comb,
    out,
    T,
    D: tl.constexpr,
    M: tl.constexpr,
    norm_eps: tl.constexpr,
    hc_eps: tl.constexpr,
    layer_norm_eps: tl.constexpr,
    NORMED: tl.constexpr,
    ROUNDS: tl.constexpr,
    PARTS: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MATRICES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The first programs have `MATRICES` M x M matrices each, the others a token's collapse.

    Tokens go backwards: what `mix_kernel` read last is still in L2. `pre` float32 `[T, M]` is scratch.
    """
    if CHAINED and not INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program, matrices = tl.program_id(0), tl.cdiv(T, MATRICES)
    if program < matrices:
        first = program * MATRICES
        _matrices(sums, base, scale, comb, first, T, D, M, R_PAD, norm_eps, hc_eps, ROUNDS, PARTS, MATRICES)
    else:
        token = T - 1 - (program - matrices)
        columns = tl.arange(0, BLOCK_D)
        inside = columns < D
        row = streams + token.to(tl.int64) * (M * D) + columns
        held = ()
        for m in tl.static_range(M):
            held += (tl.load(row + m * D, mask=inside, other=0.0),)
        _gates(sums, base, scale, pre, post, token, T, D, M, R_PAD, norm_eps, hc_eps, PARTS)
        # All threads' weights are written before any of them is read.
        tl.debug_barrier()
        total = tl.load(pre + token * M) * float32_of(held[0])
        for m in tl.static_range(1, M):
            total += tl.load(pre + token * M + m) * float32_of(held[m])
        rounded = rounded_to(total, out.dtype.element_ty)
        if NORMED:
            # What the layer's norm would read, and the two roundings it would make.
            wide = float32_of(rounded)
            factor = tl.rsqrt(tl.sum(wide * wide, 0) / D + layer_norm_eps)
            unit = float32_of(rounded_to(wide * factor, out.dtype.element_ty))
            weight = float32_of(tl.load(norm_weight + columns, mask=inside, other=0.0))
            rounded = rounded_to(weight * unit, out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * D + columns, rounded, mask=inside)


@triton.jit
def split_kernel(fn, pieces, K: tl.constexpr, M: tl.constexpr, R_PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """`fn` as bfloat16 `[2, R_PAD, K]` for `_mix`: the nearest, and the nearest to what is left."""
    held, known = _rows_of_fn(M, R_PAD)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (columns < K)[None, :]
    weight = tl.load(fn + held[:, None] * K + columns[None, :], mask=known[:, None] & inside, other=0.0)
    high = bfloat16_of(weight)
    at = pieces + tl.arange(0, R_PAD)[:, None] * K + columns[None, :]
    tl.store(at, high, mask=inside)
    tl.store(at + R_PAD * K, bfloat16_of(weight - float32_of(high)), mask=inside)


@triton.jit
def _rows_of_fn(M: tl.constexpr, R_PAD: tl.constexpr):
    """Which row of `fn` each column of `sums` comes from, and whether it comes from any.

    First 2 M for pre and post, a gap in which `_mix` puts the square, and from `R_PAD / 2` on M M for comb.
    """
    outputs = tl.arange(0, R_PAD)
    held = tl.where(outputs < R_PAD // 2, outputs, outputs - R_PAD // 2 + 2 * M)
    return held, (outputs < 2 * M) | (outputs >= R_PAD // 2) & (held < (2 + M) * M)


@triton.jit
def _mix(
    streams,
    fn,
    sums,
    T,
    first,
    part,
    D: tl.constexpr,
    M: tl.constexpr,
    R_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tokens from `first` on: `DEPTH` of the columns of `streams [T, M D] @ fn^T` and of the squares.

    `sums` is float32 `[parts, T, R_PAD]`, its columns are those of `_rows_of_fn`, with the squares in the gap. The
    weights come in pieces whose products the tensor cores make exactly: beside bfloat16 streams two bfloat16, to 2^-17
    of a weight, made here or (SPLIT, then `fn` is what `split_kernel` made) beforehand, and one where `fn` is bfloat16;
    beside float16 two tf32, to 2^-22; beside float32 they are whole.
    """
    K: tl.constexpr = M * D
    rows = first + tl.arange(0, BLOCK_T)
    outputs = tl.arange(0, R_PAD)
    held, known = _rows_of_fn(M, R_PAD)
    begin = part * DEPTH
    row_inside = rows < T
    PAIRED: tl.constexpr = 2 if SPLIT else 1
    pairs = tl.arange(0, 2 * R_PAD)
    total = tl.zeros((BLOCK_T, R_PAD * PAIRED), tl.float32)
    rest = tl.zeros((BLOCK_T, R_PAD), tl.float32)
    square = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    row_begin = rows.to(tl.int64) * K
    for k in tl.range(begin, begin + DEPTH, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        inside = (columns < K)[None, :]
        x = tl.load(streams + row_begin[:, None] + columns[None, :], mask=row_inside[:, None] & inside, other=0.0)
        wide = float32_of(x)
        square += wide * wide
        if SPLIT:
            weight = tl.load(fn + pairs[:, None] * K + columns[None, :], mask=inside, other=0.0)
            total = _product(x, weight, total)
        else:
            weight = tl.load(fn + held[:, None] * K + columns[None, :], mask=known[:, None] & inside, other=0.0)
            if x.dtype == tl.bfloat16 and weight.dtype == tl.bfloat16:
                total = _product(x, weight, total)
            elif x.dtype == tl.bfloat16:
                high = bfloat16_of(weight)
                total = _product(x, high, total)
                rest = _product(x, bfloat16_of(weight - float32_of(high)), rest)
            elif x.dtype == tl.float16:
                high = (weight.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
                total = tl.dot(wide, tl.trans(high), total, input_precision="tf32")
                total = tl.dot(wide, tl.trans(weight - high), total, input_precision="tf32")
            else:
                total = tl.dot(wide, tl.trans(weight), total, input_precision="ieee")
    if SPLIT:
        total, rest = tl.split(tl.permute(tl.reshape(total, (BLOCK_T, 2, R_PAD)), (0, 2, 1)))
    total = tl.where((outputs == 2 * M)[None, :], tl.sum(square, 1)[:, None], total + rest)
    place = (part * T + rows).to(tl.int64) * R_PAD
    tl.store(sums + place[:, None] + outputs[None, :], total, mask=row_inside[:, None])


@triton.jit
def _product(x, weight, total):
    """`total + x @ weight^T` of bfloat16, finished; the interpreter knows no bfloat16.

    The empty instruction makes the loop wait for the sum. Left to itself it goes on while the tensor cores still read
    the tile, and as the tile has another reader too (the squares), Triton 3.6 keeps no spare one for that: the next
    copy overwrites what is being read (seen on an H200 as other bits in each run).
    """
    if INTERPRETED:
        return tl.dot(float32_of(x), tl.trans(float32_of(weight)), total)
    else:
        total = tl.dot(x, tl.trans(weight), total)
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _gates(
    sums,
    base,
    scale,
    pre,
    post,
    token,
    T,
    D: tl.constexpr,
    M: tl.constexpr,
    R_PAD: tl.constexpr,
    norm_eps: tl.constexpr,
    hc_eps: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`pre [T, M]` and `post [T, M]` of a token; the parts are added in their order."""
    column = tl.arange(0, R_PAD // 2)
    mixed = tl.zeros((R_PAD // 2,), tl.float32)
    row = sums + token * R_PAD + column
    for _ in tl.static_range(PARTS):
        mixed += tl.load(row)
        row += T * R_PAD
    square = tl.sum(tl.where(column == 2 * M, mixed, 0.0), 0)
    factor = tl.where(column < M, tl.load(scale), tl.load(scale + 1))
    shift = tl.load(base + column, mask=column < 2 * M, other=0.0)
    gate = 1 / (1 + tl.exp(-(mixed * tl.rsqrt(square / (M * D) + norm_eps) * factor + shift)))
    tl.store(pre + token * M + column, gate + hc_eps, mask=column < M)
    tl.store(post + token * M - M + column, 2 * gate, mask=(column >= M) & (column < 2 * M))


@triton.jit
def _matrices(
    sums,
    base,
    scale,
    comb,
    begin,
    T,
    D: tl.constexpr,
    M: tl.constexpr,
    R_PAD: tl.constexpr,
    norm_eps: tl.constexpr,
    hc_eps: tl.constexpr,
    ROUNDS: tl.constexpr,
    PARTS: tl.constexpr,
    MATRICES: tl.constexpr,
):
    """`comb [T, M, M]` of `MATRICES` tokens from `begin` on, in registers through all Sinkhorn rounds."""
    token = begin + tl.arange(0, MATRICES)
    kept = token < T
    # Flat, so that a thread has consecutive entries and a matrix stays in one warp.
    entry = tl.arange(0, M * M)
    at = token[:, None] * R_PAD + R_PAD // 2 + entry[None, :]
    square = tl.zeros((MATRICES,), tl.float32)
    flat = tl.zeros((MATRICES, M * M), tl.float32)
    row = sums
    for _ in tl.static_range(PARTS):
        square += tl.load(row + token * R_PAD + 2 * M, mask=kept, other=0.0)
        flat += tl.load(row + at, mask=kept[:, None], other=0.0)
        row += T * R_PAD
    norm = tl.rsqrt(square / (M * D) + norm_eps)
    flat = flat * norm[:, None] * tl.load(scale + 2) + tl.load(base + 2 * M + entry)[None, :]
    weight = tl.reshape(flat, (MATRICES, M, M))
    weight = tl.exp(weight - tl.max(weight, 2)[:, :, None])
    weight = weight / tl.sum(weight, 2)[:, :, None] + hc_eps
    weight = weight * (1 / (tl.sum(weight, 1) + hc_eps))[:, None, :]
    for _ in range(ROUNDS - 1):
        weight = weight * (1 / (tl.sum(weight, 2) + hc_eps))[:, :, None]
        weight = weight * (1 / (tl.sum(weight, 1) + hc_eps))[:, None, :]
    weight = tl.reshape(weight, (MATRICES, M * M))
    tl.store(comb + token[:, None] * (M * M) + entry[None, :], weight, mask=kept[:, None])


@triton.jit
def mixed_kernel(streams, out, post, comb, mixed, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """`mixed[m] = post[m] * out + sum_n comb[n, m] * streams[n]` for one token and `BLOCK_D` columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    held = ()
    for n in tl.static_range(M):
        held += (float32_of(tl.load(streams + (token * M + n) * D + columns, mask=inside, other=0.0)),)
    added = float32_of(tl.load(out + token * D + columns, mask=inside, other=0.0))
    for m in tl.static_range(M):
        total = tl.load(comb + token * (M * M) + m) * held[0]
        for n in tl.static_range(1, M):
            total += tl.load(comb + token * (M * M) + n * M + m) * held[n]
        total += tl.load(post + token * M + m) * added
        tl.store(mixed + (token * M + m) * D + columns, rounded_to(total, mixed.dtype.element_ty), mask=inside)
