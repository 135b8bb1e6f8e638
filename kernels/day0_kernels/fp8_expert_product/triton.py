"""The grouped product of FP8 rows and FP8 weights on an NVIDIA GPU; device code in `triton_e4m3_product`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_e4m3_launch import launch_product, refusal_of_sizes, tile_rows_of
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",))

_PLAIN = {"BLOCK_N": 16, "STAGES": 4, "num_warps": 4}


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    return refusal_of_sizes(sizes) or device_refusal(device)


def fp8_expert_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, block_scales: Tensor, expert_offsets: Tensor
) -> Tensor:
    """As the reference, in two launches that need to know no row count of an expert beforehand."""
    from day0_kernels.triton_tiles import new_tiles, padded_experts, tile_kernel

    rows, (experts, outputs, depth) = len(x), weight.shape
    beyond = refusal_of_sizes({"E": experts, "Dout": outputs, "Din": depth})
    if beyond is not None:
        raise ValueError(beyond)
    out = x.new_empty(rows, outputs, dtype=torch.bfloat16)
    if rows == 0:
        return out
    chosen = configuration(__file__, x.device, "product", -(-rows // experts), _PLAIN)
    tiles = new_tiles(expert_offsets, rows, tile_rows_of(chosen))
    tile_kernel[(len(tiles),)](
        expert_offsets.contiguous(),
        tiles,
        E=experts,
        E_PAD=padded_experts(experts),
        TILE_ROWS=tile_rows_of(chosen),
        num_warps=4,
    )
    launch_product(x.contiguous(), x_scales.contiguous(), weight, block_scales, tiles, out, chosen)
    return out
