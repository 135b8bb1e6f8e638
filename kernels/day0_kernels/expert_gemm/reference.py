"""Definition of the grouped expert product in plain torch; it does not know gates, activations or weights' formats."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from day0_kernels.row_invariant import TILE_ROWS, bmm, linear
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

GROUP_ELEMENTS = 1 << 20


def expert_gemm(x: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor:
    """`out[i] = weight[e] @ x[i]` for the rows `expert_offsets[e] <= i < expert_offsets[e + 1]` -> `[N, Dout]`.

    `x [N, Din]` grouped by expert, `weight [E, Dout, Din]`, `expert_offsets` int32 `[E + 1]` from 0 to N. An expert
    may have no row, and there may be no row at all.
    """
    out = x.new_empty(len(x), weight.shape[1])
    bounds = expert_offsets.tolist()
    owned = [(e, first, last) for e, (first, last) in enumerate(pairwise(bounds)) if first < last]
    step = max(1, GROUP_ELEMENTS // weight[0].numel())
    for begin in range(0, len(owned), step):
        group = owned[begin : begin + step]
        if len(group) == 1 or any(last - first > TILE_ROWS for _, first, last in group):
            for expert, first, last in group:
                out[first:last] = linear(x[first:last].float(), weight[expert].float()).to(x.dtype)
            continue
        # Few rows each: one tile per expert, all in one call. The bits are those of the loop above.
        experts = torch.tensor([expert for expert, _, _ in group], device=x.device)
        place = torch.tensor(
            [i * TILE_ROWS + j for i, (_, first, last) in enumerate(group) for j in range(last - first)],
            device=x.device,
        )
        rows = slice(group[0][1], group[-1][2])
        tiled = x.new_zeros(len(group) * TILE_ROWS, x.shape[1], dtype=torch.float32)
        tiled.index_copy_(0, place, x[rows].float())
        chosen = weight.index_select(0, experts).float()
        product = bmm(tiled.view(len(group), TILE_ROWS, -1), chosen.transpose(1, 2)).flatten(0, 1)
        out[rows] = product.index_select(0, place).to(x.dtype)
    return out
