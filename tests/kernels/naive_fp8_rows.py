"""Second definitions of FP8 rows and their product with MXFP4 weights, float64 and one entry at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

Results = dict[str, Tensor]

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)


def _place(column: int) -> int:
    """Where a column lies in the order of the MXFP4 product."""
    group, step, half, byte = column % 128 // 32, column % 32 // 8, column % 8 // 4, column % 4
    return column - column % 128 + step * 32 + half * 16 + group * 4 + byte


def _weight(codes: list[int], exponents: list[int]) -> list[float]:
    """One row's values; a byte holds an even column in its low half and the odd one behind it."""
    out = []
    for column in range(2 * len(codes)):
        code = codes[column // 2] >> 4 if column % 2 else codes[column // 2] & 15
        value = math.ldexp(_MAGNITUDES[code & 7], exponents[column // 32] - 128)
        out.append(-value if code & 8 else value)
    return out


def mxfp4_fp8_expert_gemm(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    tops: Tensor,
    expert_offsets: Tensor,
    *,
    by_group: bool,
) -> Results:
    held, out = x.view(torch.float8_e4m3fn).double(), torch.zeros(len(x), codes.shape[1], dtype=torch.float64)
    order = [_place(column) for column in range(x.shape[1])]
    bounds, bits = expert_offsets.tolist(), codes.tolist()
    for expert, (first, end) in enumerate(pairwise(bounds)):
        for n in range(codes.shape[1] if first < end else 0):
            weight = torch.tensor(_weight(bits[expert][n], scales[expert, n].tolist()), dtype=torch.float64)
            for i in range(first, end):
                out[i, n] = (weight @ held[i, order]) * x_scales[i, 0]
    return {"out": out}


def fp8_quantise(x: Tensor, *, group: int, mxfp4_order: bool) -> Results:
    q = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.zeros(len(x), -(-x.shape[1] // group), dtype=torch.float64)
    for row in range(len(x)):
        for k in range(scales.shape[1]):
            largest = float(x[row, k * group : (k + 1) * group].abs().max())
            scales[row, k] = 2.0 ** (math.floor(math.log2(largest)) - 7)
        for column in range(x.shape[1]):
            value = (x[row, column] / scales[row, column // group]).to(torch.float8_e4m3fn)
            q[row, _place(column) if mxfp4_order else column] = value.view(torch.uint8)
    return {"q": q, "x_scales": scales}


DEFINED: Mapping[str, Callable[..., Results]] = {fn.__name__: fn for fn in (mxfp4_fp8_expert_gemm, fp8_quantise)}
