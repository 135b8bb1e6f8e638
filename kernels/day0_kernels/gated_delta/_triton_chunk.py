"""What a chunk of 16 tokens contributes apart from the state it meets; it does not know the chunk before it.

With `G` the running sum of the log gates in the chunk, per head:

    L[i,j] = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)  for i > j        solve  = (I + L)^-1 diag(beta)
    within[i,j] = sum_c q_ic k_jc exp(G_ic - G_jc)  for i >= j         enter  = k exp(G)
    reach = q exp(G)                                                    leave  = k exp(G_end - G)

Both triangles are formed by halves: blocks of 1, 2, 4 and 8 rows against the block of as many columns before them.
There `exp(G_i - G_j) = exp(G_i - G_p) exp(G_p - G_j)` with p the last column of that block, and each exponent is a sum
of the gates between, never positive and never a difference of sums: gates of any size neither overflow nor cancel.
The inverse grows with the same halves, `X <- X - X L_block X`, which is substitution by blocks; a power series
would cancel where keys repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_packed import sequence_of_part
from day0_kernels.triton_rounding import float32_of

CHUNK = tl.constexpr(16)
# exp of less is 0 in float32; larger gates would leave the range of the float16 in which they are summed.
LOWEST_LOG_GATE = tl.constexpr(-1000.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_sums(q_at, k_at, in_chunk, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """`1 / sqrt(sum q^2 + eps)`, the same of k, and `sum q k`, each `[16, 1]`, of rows of K channels."""
    channel = tl.arange(0, BLOCK_K)[None, :]
    inside = in_chunk[:, None] & (channel < K)
    x = float32_of(tl.load(q_at + channel, mask=inside, other=0.0))
    y = float32_of(tl.load(k_at + channel, mask=inside, other=0.0))
    norm_x = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) + eps)
    norm_y = tl.rsqrt(tl.sum(y * y, axis=1, keep_dims=True) + eps)
    return norm_x, norm_y, tl.sum(x * y, axis=1, keep_dims=True)


@triton.jit
def _sum_rows(chosen, terms, SPLIT: tl.constexpr, EXACT: tl.constexpr):
    """`chosen [16, 16] @ terms [16, K]` for a matrix of zeros and ones.

    Unless EXACT, terms go in as one float16, or with SPLIT as two whose sum has 22 bits.
    """
    if EXACT:
        return tl.dot(chosen.to(tl.float32), terms, input_precision="ieee")
    pick = chosen.to(tl.float16)
    high = terms.to(tl.float16)
    total = tl.dot(pick, high)
    if SPLIT:
        total = tl.dot(pick, (terms - high.to(tl.float32)).to(tl.float16), total)
    return total


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """`a @ b` accumulated in float32; operands in float16, or float32 throughout with EXACT."""
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit(do_not_specialize=["sequences"])
def chunk_terms(
    q,
    k,
    g,
    beta,
    state_slots,
    cu_seqlens,
    pair,
    leave,
    mix,
    fade,
    sequences,
    l2norm_eps,
    q_row,
    q_head,
    k_row,
    k_head,
    g_row,
    g_head,
    g_channel,
    beta_row,
    beta_head,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Program (chunk, head), heads fastest.

    Written, contiguous, C part numbers (triton_packed), padded with zeros to BLOCK_K, float16, or float32 with EXACT:
    `pair [C, H, 32, BLOCK_K]` (-`enter` over `reach`), `leave [C, H, 16, BLOCK_K]`, `mix [C, H, 32, 16]` (`solve` over
    `within solve`); `fade [C, H, BLOCK_K]` float32. q is normalised and not scaled. Numbers without a token are left.
    """
    program = tl.program_id(0)
    head = program % HEADS
    sequence, _, end, first = sequence_of_part(cu_seqlens, sequences, program // HEADS, CHUNK)
    left = tl.where(tl.load(state_slots + sequence) >= 0, end - first, 0)
    if left > 0:
        i = tl.arange(0, CHUNK)
        token = (first + i).to(tl.int64)
        in_chunk = i < left
        rate = float32_of(tl.load(beta + token * beta_row + head * beta_head, mask=in_chunk, other=0.0))
        q_at = q + token[:, None] * q_row + head * q_head
        k_at = k + token[:, None] * k_row + head * k_head
        g_at = g + token[:, None] * g_row + head * g_head
        norm_q, norm_k, same = _row_sums(q_at, k_at, in_chunk, l2norm_eps, K, BLOCK_K)
        # All gates at once, which also brings them close for the slices below.
        every = tl.arange(0, BLOCK_K)[None, :]
        gates = float32_of(tl.load(g_at + every * g_channel, mask=in_chunk[:, None] & (every < K), other=0.0))
        total = tl.sum(tl.maximum(gates, LOWEST_LOG_GATE), axis=0, keep_dims=True) * LOG2_E
        tl.store(fade + program.to(tl.int64) * BLOCK_K + every, tl.exp2(total))
        at = (program.to(tl.int64) * CHUNK + i)[:, None]
        to, of = i[:, None], i[None, :]
        overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
        attend = tl.where(to == of, same * norm_q * norm_k, 0.0)
        kind = leave.dtype.element_ty
        enter_at = pair + (program.to(tl.int64) * 2 * CHUNK + i)[:, None] * BLOCK_K
        # By slices of the channels: a warp then holds all it needs in registers.
        for base in range(0, BLOCK_K, SLICE):
            channel = (base + tl.arange(0, SLICE))[None, :]
            inside = in_chunk[:, None] & (channel < K)
            query = float32_of(tl.load(q_at + channel, mask=inside, other=0.0)) * norm_q
            key = float32_of(tl.load(k_at + channel, mask=inside, other=0.0)) * norm_k
            gate = float32_of(tl.load(g_at + channel * g_channel, mask=inside, other=0.0))
            gate = tl.maximum(gate, LOWEST_LOG_GATE) * LOG2_E
            for level in tl.static_range(4):
                size = 1 << level
                late = to // size % 2 == 1
                # A row of the later half sums the gates up to its own, one of the earlier half those behind its own.
                between = (to // size == of // size) & ((late & (of <= to)) | ((to // size % 2 == 0) & (of > to)))
                factor = tl.exp2(_sum_rows(between, gate, SPLIT, EXACT))
                near = key * factor
                columns = tl.trans(near)
                block = late & (of // size == to // size - 1)
                attend += tl.where(block, product(query * factor, columns, EXACT), 0.0)
                overlap += tl.where(block, product(near, columns, EXACT), 0.0)
            decay = tl.exp2(_sum_rows(of <= to, gate, SPLIT, EXACT))
            rest = tl.exp2(_sum_rows(of > to, gate, SPLIT, EXACT))
            tl.store(enter_at + channel, (-key * decay).to(kind))
            tl.store(enter_at + CHUNK * BLOCK_K + channel, (query * decay).to(kind))
            tl.store(leave + at * BLOCK_K + channel, (key * rest).to(kind))

        overlap *= rate[:, None]
        inverse = tl.where(to == of, 1.0, tl.where((to % 2 == 1) & (of == to - 1), -overlap, 0.0))
        for level in tl.static_range(1, 4):
            size = 1 << level
            block = (to // size % 2 == 1) & (of // size == to // size - 1)
            step = product(product(inverse, tl.where(block, overlap, 0.0), EXACT), inverse, EXACT)
            inverse -= step
        inverse *= rate[None, :]
        mix_at = mix + ((program.to(tl.int64) * 2 * CHUNK + i)[:, None] * CHUNK + of)
        tl.store(mix_at, inverse.to(kind))
        tl.store(mix_at + CHUNK * CHUNK, product(attend, inverse, EXACT).to(kind))
