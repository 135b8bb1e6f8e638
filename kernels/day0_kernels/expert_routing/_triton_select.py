"""Device code of the gate's choice: scores, the best groups, then the best experts one after the other."""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST_SUM = tl.constexpr(1e-20)
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_TAKEN = tl.constexpr(-(1 << 63))


@triton.jit
def _score(x, peak, total, SCORE: tl.constexpr):
    if SCORE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    elif SCORE == "softmax":
        return tl.exp(x - peak) / total
    else:
        power = tl.exp(-tl.abs(x))
        above = 1.0 + power
        # log(1 + power) to the last bits where 1 + power has lost some.
        log = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
        return tl.sqrt(tl.where(x > 0, x, 0.0) + log + (x - x))


@triton.jit
def _ranked(x, ids):
    """An int64 that is larger for a larger x, of equal ones for the lower id; NaN is the largest, x is never -0.0."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x != x, _NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _value_of(ranked):
    key = (ranked >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(ranked):
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _in_open_groups(
    ranked, experts, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, TOPK_GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """Where an expert is in one of the best groups; a group counts with the sum of its two best."""
    ids = tl.arange(0, GROUPS_PAD)
    totals = tl.zeros((GROUPS_PAD,), tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where(experts // SIZE == group, ranked, _TAKEN)
        first = tl.max(members, 0)
        second = tl.max(tl.where(members == first, _TAKEN, members), 0)
        totals = tl.where(ids == group, _value_of(first) + _value_of(second), totals)
    best = tl.where(ids < GROUPS, _ranked(totals, ids), _TAKEN)
    found = experts < 0
    for _ in tl.static_range(TOPK_GROUPS):
        first = tl.max(best, 0)
        best = tl.where(best == first, _TAKEN, best)
        found = found | (experts // SIZE == _id_of(first))
    return found


@triton.jit
def select_kernel(
    logits,
    bias,
    topk_ids,
    topk_weights,
    scaling,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """A row of `logits [T, E]` -> `topk_ids`, `topk_weights [T, K]`."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, E_PAD)
    real = experts < E
    x = tl.load(logits + row * E + experts, mask=real, other=float("-inf"))
    peak, total = 0.0, 1.0
    if SCORE == "softmax":
        # Integers keep a NaN where a maximum of floats would drop it.
        peak = _value_of(tl.max(_ranked(x, experts), 0))
        total = tl.sum(tl.where(real, tl.exp(x - peak), 0.0), 0)
    choice = _score(x, peak, total, SCORE) + tl.load(bias + experts, mask=real, other=0.0)
    ranked = tl.where(real, _ranked(choice, experts), _TAKEN)
    if GROUPS > TOPK_GROUPS:
        opened = _in_open_groups(ranked, experts, GROUPS, GROUPS_PAD, TOPK_GROUPS, E // GROUPS)
        shut = _ranked(tl.full((E_PAD,), float("-inf"), tl.float32), experts)
        ranked = tl.where(real & (opened == 0), shut, ranked)
    slots = tl.arange(0, K_PAD)
    picked = tl.zeros((K_PAD,), tl.int32)
    for k in tl.range(K):
        first = tl.max(ranked, 0)
        ranked = tl.where(ranked == first, _TAKEN, ranked)
        picked = tl.where(slots == k, _id_of(first), picked)
    score = _score(tl.load(logits + row * E + picked, mask=slots < K, other=0.0), peak, total, SCORE)
    if NORMALISE:
        score = score / (tl.sum(tl.where(slots < K, score, 0.0), 0) + _LEAST_SUM)
    tl.store(topk_ids + row * K + slots, picked, mask=slots < K)
    tl.store(topk_weights + row * K + slots, score * scaling, mask=slots < K)
