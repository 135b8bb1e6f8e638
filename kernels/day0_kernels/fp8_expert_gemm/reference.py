"""Definition of the grouped expert product on FP8 weights; it does not know gates, activations or checkpoints."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from day0_kernels.expert_gemm.reference import expert_gemm
from day0_kernels.mxfp4 import FP8_BLOCK
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

GROUP_ELEMENTS = 1 << 20


def fp8_expert_gemm(x: Tensor, weight: Tensor, block_scales: Tensor, expert_offsets: Tensor) -> Tensor:
    """`out[i] = (weight[e] * its block scales) @ x[i]` for `expert_offsets[e] <= i < expert_offsets[e + 1]`.

    `x [N, Din]` grouped by expert, `weight` uint8 `[E, Dout, Din]` e4m3fn bits, `block_scales` float32
    `[E, ceil(Dout / 128), ceil(Din / 128)]`, `expert_offsets` int32 `[E + 1]` from 0 to N -> `[N, Dout]` in x's dtype,
    computed in float32. Only experts with rows are read. A NaN in the weight makes the outputs it reaches NaN.
    """
    out = x.new_empty(len(x), weight.shape[1])
    bounds = expert_offsets.tolist()
    owned = [(e, first, last) for e, (first, last) in enumerate(pairwise(bounds)) if first < last]
    step = max(1, GROUP_ELEMENTS // weight[0].numel())
    for begin in range(0, len(owned), step):
        group = owned[begin : begin + step]
        first, last = group[0][1], group[-1][2]
        experts = torch.tensor([expert for expert, _, _ in group], device=x.device)
        offsets = torch.tensor([0, *(end - first for _, _, end in group)], dtype=torch.int32, device=x.device)
        wide = _widened(weight.index_select(0, experts), block_scales.index_select(0, experts))
        out[first:last] = expert_gemm(x[first:last], wide, offsets)
    return out


def _widened(weight: Tensor, block_scales: Tensor) -> Tensor:
    """Values float32 `[E, Dout, Din]` of e4m3fn bits and block scales."""
    values = weight.view(torch.float8_e4m3fn).float()
    for block in range(block_scales.shape[1]):
        scales = block_scales[:, block].repeat_interleave(FP8_BLOCK, 1)[:, : values.shape[2]]
        values[:, block * FP8_BLOCK : (block + 1) * FP8_BLOCK] *= scales.unsqueeze(1)
    return values
