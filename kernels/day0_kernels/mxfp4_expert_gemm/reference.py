"""Definition of the grouped expert product on MXFP4 weights; it does not know gates, activations or checkpoints."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from day0_kernels.expert_gemm.reference import expert_gemm
from day0_kernels.mxfp4 import decode
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

GROUP_ELEMENTS = 1 << 20


def mxfp4_expert_gemm(x: Tensor, codes: Tensor, scales: Tensor, expert_offsets: Tensor) -> Tensor:
    """`out[i] = decode(codes[e], scales[e]) @ x[i]` for `expert_offsets[e] <= i < expert_offsets[e + 1]`.

    `x [N, Din]` grouped by expert, `codes` uint8 `[E, Dout, Din / 2]` low nibble first, `scales` uint8
    `[E, Dout, Din / 32]` e8m0, `expert_offsets` int32 `[E + 1]` from 0 to N -> `[N, Dout]` in x's dtype, computed in
    float32. Only experts with rows are decoded. A scale byte 255 is NaN and makes the outputs it reaches NaN.
    """
    out = x.new_empty(len(x), codes.shape[1])
    bounds = expert_offsets.tolist()
    owned = [(e, first, last) for e, (first, last) in enumerate(pairwise(bounds)) if first < last]
    step = max(1, GROUP_ELEMENTS // (codes.shape[1] * codes.shape[2] * 2))
    for begin in range(0, len(owned), step):
        group = owned[begin : begin + step]
        first, last = group[0][1], group[-1][2]
        experts = torch.tensor([expert for expert, _, _ in group], device=x.device)
        offsets = torch.tensor([0, *(end - first for _, _, end in group)], dtype=torch.int32, device=x.device)
        weight = decode(codes.index_select(0, experts), scales.index_select(0, experts))
        out[first:last] = expert_gemm(x[first:last], weight, offsets)
    return out
