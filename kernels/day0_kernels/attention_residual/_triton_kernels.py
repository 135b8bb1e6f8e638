"""Device code of attention over the residual bank: one pass over a token's sources."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import float32_of, rounded_to

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["N"])
def residual_kernel(
    sources,
    query,
    out,
    N,
    token_row,
    source_row,
    logit_scale,
    norm_eps,
    D: tl.constexpr,
    Q: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (token): an online softmax over its `N` sources, all columns of one at a time.

    A source is read once, `STAGES - 1` ahead of its turn; the running mix of each of `Q` queries stays in registers.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    asked, held, peaks, totals = (), (), (), ()
    for i in tl.static_range(Q):
        asked += (tl.load(query + i * D + columns, mask=inside, other=0.0),)
        held += (tl.zeros((BLOCK_D,), tl.float32),)
        peaks += (-float("inf"),)
        totals += (0.0,)
    at = sources + token * token_row + columns
    for n in tl.range(0, N, num_stages=STAGES):
        x = float32_of(tl.load(at + tl.cast(n, tl.int64) * source_row, mask=inside, other=0.0))
        factor = tl.rsqrt(tl.sum(x * x, 0) / D + norm_eps)
        new_held, new_peaks, new_totals = (), (), ()
        for i in tl.static_range(Q):
            logit = tl.sum(x * asked[i], 0) * factor * (logit_scale * _LOG2_E)
            peak = tl.maximum(peaks[i], logit)
            fade = tl.exp2(peaks[i] - peak)
            weight = tl.exp2(logit - peak)
            new_totals += (totals[i] * fade + weight,)
            if NORMED:
                weight = weight * factor
            new_held += (held[i] * fade + weight * x,)
            new_peaks += (peak,)
        held, peaks, totals = new_held, new_peaks, new_totals
    for i in tl.static_range(Q):
        mixed = rounded_to(held[i] / totals[i], out.dtype.element_ty)
        tl.store(out + (token * Q + i) * D + columns, mixed, mask=inside)
