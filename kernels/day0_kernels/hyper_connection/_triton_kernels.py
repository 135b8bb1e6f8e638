"""Device code of hyper-connection mixing; what to launch with which sizes is the launcher's business."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import INTERPRETED, float32_of, rounded_to


@triton.jit(do_not_specialize=["T"])
def mix_kernel(
    streams,
    fn,
    sums,
    squares,
    T,
    K: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One part of `streams [T, K] @ fn [R, K]^T` and of the sums of squares, for `DEPTH` of the K columns.

    `sums [parts, T, R]` and `squares [parts, T]` are float32. `fn` comes in pieces whose products the tensor cores make
    exactly: three bfloat16 beside bfloat16 streams, two tf32 (to 2^-22) beside float16, whole beside float32.
    """
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    outputs = tl.arange(0, R_PAD)
    begin = part * DEPTH
    row_inside = rows < T
    total = tl.zeros((BLOCK_T, R_PAD), tl.float32)
    square = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    row_begin = rows.to(tl.int64) * K
    for k in range(begin, begin + DEPTH, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        inside = columns < K
        x = tl.load(
            streams + row_begin[:, None] + columns[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0
        )
        weight = tl.load(
            fn + outputs[None, :] * K + columns[:, None], mask=(outputs < R)[None, :] & inside[:, None], other=0.0
        )
        wide = float32_of(x)
        square += wide * wide
        if x.dtype == tl.bfloat16:
            for _ in tl.static_range(3):
                bits = weight.to(tl.uint32, bitcast=True) >> 16
                piece = (bits << 16).to(tl.float32, bitcast=True)
                if INTERPRETED:
                    total = tl.dot(wide, piece, total)
                else:
                    total = tl.dot(x, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), total)
                weight = weight - piece
        elif x.dtype == tl.float16:
            high = (weight.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            total = tl.dot(wide, high, total, input_precision="tf32")
            total = tl.dot(wide, weight - high, total, input_precision="tf32")
        else:
            total = tl.dot(wide, weight, total, input_precision="ieee")
    place = part.to(tl.int64) * T + rows
    tl.store(sums + place[:, None] * R + outputs[None, :], total, mask=row_inside[:, None] & (outputs < R)[None, :])
    tl.store(squares + place, tl.sum(square, 1), mask=row_inside)


@triton.jit(do_not_specialize=["T"])
def collapse_kernel(
    streams,
    sums,
    squares,
    base,
    scale,
    post,
    comb,
    collapsed,
    T,
    D: tl.constexpr,
    M: tl.constexpr,
    norm_eps: tl.constexpr,
    hc_eps: tl.constexpr,
    ROUNDS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds the parts of `mix_kernel` up; the first programs make post and comb, the others collapse streams.

    A program of the first kind has `BLOCK_T` tokens and their M x M matrices in registers through all Sinkhorn rounds;
    one of the second has one token and `BLOCK_D` columns.
    """
    R: tl.constexpr = (2 + M) * M
    matrices = tl.cdiv(T, BLOCK_T)
    program = tl.program_id(0)
    if program < matrices:
        _weights(
            sums,
            squares,
            base,
            scale,
            post,
            comb,
            program,
            T,
            D,
            M,
            R,
            norm_eps,
            hc_eps,
            ROUNDS,
            PARTS,
            PARTS_PAD,
            BLOCK_T,
        )
    else:
        CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        # Backwards: what was read last is still in L2.
        token = (T - 1 - (program - matrices) // CHUNKS).to(tl.int64)
        columns = (program - matrices) % CHUNKS * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = columns < D
        held = ()
        for m in tl.static_range(M):
            held += (float32_of(tl.load(streams + (token * M + m) * D + columns, mask=inside, other=0.0)),)
        parts, outputs = tl.arange(0, PARTS_PAD), tl.arange(0, R_PAD)
        place = parts.to(tl.int64) * T + token
        added = tl.load(
            sums + place[:, None] * R + outputs[None, :],
            mask=(parts < PARTS)[:, None] & (outputs < M)[None, :],
            other=0.0,
        )
        square = tl.sum(tl.load(squares + place, mask=parts < PARTS, other=0.0), 0)
        mixed = tl.sum(added, 0) * tl.rsqrt(square / (M * D) + norm_eps)
        shift = tl.load(base + outputs, mask=outputs < M, other=0.0)
        pre = 1 / (1 + tl.exp(-(mixed * tl.load(scale) + shift))) + hc_eps
        total = tl.zeros((BLOCK_D,), tl.float32)
        for m in tl.static_range(M):
            total += tl.sum(tl.where(outputs == m, pre, 0.0), 0) * held[m]
        tl.store(collapsed + token * D + columns, rounded_to(total, collapsed.dtype.element_ty), mask=inside)


@triton.jit
def _weights(
    sums,
    squares,
    base,
    scale,
    post,
    comb,
    program,
    T,
    D: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    norm_eps: tl.constexpr,
    hc_eps: tl.constexpr,
    ROUNDS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """`post [T, M]` and `comb [T, M, M]` of `BLOCK_T` tokens."""
    tokens = program * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < T
    m, entries = tl.arange(0, M), tl.arange(0, M * M)
    parts = tl.arange(0, PARTS_PAD)
    place = parts.to(tl.int64)[None, :] * T + tokens[:, None]
    kept = inside[:, None] & (parts < PARTS)[None, :]
    square = tl.sum(tl.load(squares + place, mask=kept, other=0.0), 1)
    mixed_post = tl.sum(
        tl.load(sums + place[:, :, None] * R + M + m[None, None, :], mask=kept[:, :, None], other=0.0), 1
    )
    mixed_comb = tl.sum(
        tl.load(sums + place[:, :, None] * R + 2 * M + entries[None, None, :], mask=kept[:, :, None], other=0.0), 1
    )
    norm = tl.rsqrt(square / (M * D) + norm_eps)
    gate = mixed_post * norm[:, None] * tl.load(scale + 1) + tl.load(base + M + m)[None, :]
    tl.store(post + tokens[:, None] * M + m[None, :], 2 / (1 + tl.exp(-gate)), mask=inside[:, None])
    weight = mixed_comb * norm[:, None] * tl.load(scale + 2) + tl.load(base + 2 * M + entries)[None, :]
    weight = tl.reshape(weight, (BLOCK_T, M, M))
    weight = tl.exp(weight - tl.max(weight, 2)[:, :, None])
    weight = weight / tl.sum(weight, 2)[:, :, None] + hc_eps
    weight = weight * (1 / (tl.sum(weight, 1) + hc_eps))[:, None, :]
    for _ in range(ROUNDS - 1):
        weight = weight * (1 / (tl.sum(weight, 2) + hc_eps))[:, :, None]
        weight = weight * (1 / (tl.sum(weight, 1) + hc_eps))[:, None, :]
    weight = tl.reshape(weight, (BLOCK_T, M * M))
    tl.store(comb + tokens[:, None] * (M * M) + entries[None, :], weight, mask=inside[:, None])


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
