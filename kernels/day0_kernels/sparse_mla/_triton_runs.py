"""Device code that makes the runs of a query's positions one softmax, for Hopper; who summed a run it does not know."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# 64 heads by 256 values as 32 times four floats of 128 threads: which entry a register, a lane and a warp have.
_BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 128], [0, 256]],
        [],
        [32, 512],
    )
)


@gluon.jit
def _place():
    """Offsets `[32, 512]` by thread, and the first of the 16 heads of its warp."""
    i = gl.arange(0, 32, layout=gl.SliceLayout(1, _BY_THREAD))[:, None]
    j = gl.arange(0, 512, layout=gl.SliceLayout(0, _BY_THREAD))[None, :]
    return i * 512 + j, j // 128 * 16


@gluon.jit
def park(parked, held, heads, FULL: gl.constexpr):
    """`[64, 256]` thread after thread, so that a warp writes whole lines; only the same threads read it again."""
    seen = held.reshape([4, 2, 8, 16, 2, 4, 2]).permute([3, 1, 0, 2, 5, 4, 6]).reshape([32, 512])
    seen = gl.convert_layout(seen, _BY_THREAD)
    at, head = _place()
    if FULL:
        gl.store(parked + at, seen, eviction_policy="evict_last")
    else:
        gl.store(parked + at, seen, mask=head < heads, eviction_policy="evict_last")


@gluon.jit
def parked_of(parked, heads, FULL: gl.constexpr, VALUES: gl.constexpr):
    """What `park` put there."""
    at, head = _place()
    if FULL:
        seen = gl.load(parked + at, eviction_policy="evict_last")
    else:
        seen = gl.load(parked + at, mask=head < heads, other=0.0, eviction_policy="evict_last")
    held = seen.reshape([16, 2, 4, 8, 4, 2, 2]).permute([2, 1, 3, 0, 5, 4, 6]).reshape([64, 256])
    return gl.convert_layout(held, VALUES)


@gluon.jit
def shares_of(peak, other):
    """The common peak of two softmaxes and the factors on both; -inf is the peak of nothing."""
    top = gl.maximum(peak, other)
    safe = gl.where(top == float("-inf"), 0.0, top)
    return top, exp2(peak - safe), exp2(other - safe)


@gluon.jit
def share_of_whole(peak, total, sink_at, there, SINKS: gl.constexpr):
    """The factor on a sum of weighted values over `2^peak`: the inverse of `total`, or of it and the sink's weight."""
    if SINKS:
        sink = gl.load(sink_at, mask=there, other=0.0) * 1.4426950408889634
        top = gl.maximum(peak, sink)
        fade = exp2(peak - top)
        return fade / gl.fma(total, fade, exp2(sink - top))
    else:
        return 1.0 / gl.where(total == 0.0, 1.0, total)


@gluon.jit
def join_runs(
    parts,
    peaks,
    totals,
    sinks,
    out,
    SINKS: gl.constexpr,
    H: gl.constexpr,
    V: gl.constexpr,
    RUNS: gl.constexpr,
):
    """Program (query, head): the runs of APART in their order; zeros where no run has a position."""
    FLAT: gl.constexpr = gl.BlockedLayout([V // 128], [32], [4], [0])
    row = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1)
    column = gl.arange(0, V, layout=FLAT)
    none = gl.full([V], 0.0, gl.float32, layout=FLAT)
    at = row * RUNS * H + head
    # It may have been launched before `attend_pairs` ended.
    gdc_wait()
    total = gl.load(totals + at)
    peak = gl.load(peaks + at)
    # What was never written may be read: it is not chosen.
    part = gl.load(parts + at * V + column)
    held = gl.where(total != 0.0, part, 0.0)
    for r in gl.static_range(1, RUNS):
        here = at + r * H
        other_total = gl.load(totals + here)
        other_peak = gl.load(peaks + here)
        part = gl.load(parts + here * V + column)
        written = other_total != 0.0
        top, old, new = shares_of(peak, other_peak)
        total = gl.where(written, gl.fma(other_total, new, total * old), total)
        peak = gl.where(written, top, peak)
        held = gl.where(written, gl.fma(part, none + new, held * old), held)
    share = share_of_whole(peak, total, sinks + head, True, SINKS)
    gl.store(out + (row * H + head) * V + column, (held * share).to(out.dtype.element_ty))
