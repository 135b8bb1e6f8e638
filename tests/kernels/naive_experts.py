"""Second definitions of what surrounds the experts, float64 and one entry at a time, from the README formulas alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Tensor]


def _e4m3_value(bits: int) -> float:
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -magnitude if bits >> 7 else magnitude


_E4M3_VALUES = torch.tensor([_e4m3_value(bits) for bits in range(256)], dtype=torch.float64)


def fp8_expert_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, block_scales: Tensor, expert_offsets: Tensor
) -> Results:
    out = torch.zeros(len(x), weight.shape[1], dtype=torch.float64)
    for i in range(len(x)):
        expert = sum(int(offset) <= i for offset in expert_offsets.tolist()) - 1
        for block in range(x_scales.shape[1]):
            columns = slice(128 * block, 128 * block + 128)
            sums = _E4M3_VALUES[weight[expert, :, columns].int()] @ _E4M3_VALUES[x[i, columns].int()]
            for n in range(len(sums)):
                out[i, n] += sums[n] * x_scales[i, block] * block_scales[expert, n // 128, block]
    return {"out": out}


def _score(logits: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    if score == "softmax":
        return [math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
    return [math.sqrt(math.log1p(math.exp(x))) for x in logits]


def select_experts(logits: Tensor, bias: Tensor, **scalars: Any) -> Results:
    top_k, groups, size = scalars["top_k"], scalars["groups"], len(bias) // scalars["groups"]
    ids, weights = [], []
    for row in logits.tolist():
        scores = _score(row, scalars["score"])
        choice = [a + b for a, b in zip(scores, bias.tolist(), strict=True)]
        best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        opened = sorted(range(groups), key=lambda g: (-best[g], g))[: scalars["topk_groups"]]
        order = sorted(range(len(choice)), key=lambda e: (e // size not in opened, -choice[e], e))
        if len(opened) * size < top_k:
            # Behind the open groups there is no order of choice left, only that of ids.
            order = order[: len(opened) * size] + sorted(order[len(opened) * size :])
        chosen = order[:top_k]
        total = sum(scores[e] for e in chosen) + 1e-20 if scalars["normalise"] else 1.0
        ids.append(chosen)
        weights.append([scores[e] / total * scalars["scaling"] for e in chosen])
    return {
        "topk_ids": torch.tensor(ids, dtype=torch.int32).view(-1, top_k),
        "topk_weights": torch.tensor(weights, dtype=torch.float64).view(-1, top_k),
    }


def permute_rows(x: Tensor, topk_ids: Tensor, experts: int) -> Results:
    rows, offsets, places = torch.zeros(topk_ids.numel(), x.shape[1], dtype=x.dtype), [0], torch.full_like(topk_ids, -1)
    for expert in range(experts):
        taken = offsets[-1]
        for t, ids in enumerate(topk_ids.tolist()):
            for k, chosen in enumerate(ids):
                if chosen == expert:
                    rows[taken], places[t, k] = x[t], taken
                    taken += 1
        offsets.append(taken)
    return {"rows": rows, "expert_offsets": torch.tensor(offsets, dtype=torch.int32), "places": places}


def unpermute_rows(rows: Tensor, topk_weights: Tensor, places: Tensor) -> Results:
    out = torch.zeros(len(places), rows.shape[1], dtype=torch.float64)
    for t, row in enumerate(places.tolist()):
        for k, place in enumerate(row):
            if place != -1:
                out[t] += topk_weights[t, k] * rows[place]
    return {"out": out}


def _gated(gate: float, up: float, limit: float | None, alpha: float, up_offset: float) -> float:
    if limit is not None:
        gate, up = min(gate, limit), max(min(up, limit), -limit)
    return gate / (1 + math.exp(-alpha * gate)) * (up + up_offset)


def swiglu(gate_up: Tensor, **scalars: Any) -> Results:
    width = gate_up.shape[1] // 2
    rows = [[_gated(row[f], row[width + f], **scalars) for f in range(width)] for row in gate_up.tolist()]
    return {"out": torch.tensor(rows, dtype=torch.float64).view(len(rows), width)}


def swiglu_fp8(gate_up: Tensor, **scalars: Any) -> Results:
    """The nearest of all e4m3 values, of two as near the one whose last bit is 0."""
    width = gate_up.shape[1] // 2
    grouped = swiglu(gate_up, **scalars)["out"].view(len(gate_up), width // 128, 128)
    peaks = grouped.abs().amax(-1)
    scales = torch.where(peaks == 0, 1.0, peaks / 448)
    wanted = (grouped / scales.unsqueeze(-1)).flatten()
    codes = torch.tensor(sorted(range(127), key=lambda bits: (bits & 1, bits)))
    nearest = codes[(wanted.abs().unsqueeze(1) - _E4M3_VALUES[codes]).abs().argmin(1)]
    values = nearest | (wanted.signbit().int() << 7)
    return {"values": values.to(torch.uint8).view(len(gate_up), width), "scales": scales}


DEFINED: Mapping[str, Callable[..., Results]] = {
    fn.__name__: fn for fn in (fp8_expert_product, select_experts, permute_rows, unpermute_rows, swiglu, swiglu_fp8)
}
