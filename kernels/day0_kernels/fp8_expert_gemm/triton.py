"""The grouped expert product on FP8 weights on an NVIDIA GPU; its device code prepares `triton_e4m3_product`.

A row becomes two e4m3 terms that share a power of two for each 128 columns. They hold every bfloat16 within 2^-9 of the
largest of those columns exactly, and what is smaller to 2^-17 of it, so that nothing is rounded but sums: as accurate
as a bfloat16 product, at its rate, with the weights as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_e4m3_launch import BLOCK, launch_product, refusal_of_sizes, tile_rows_of
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("bfloat16",))

_PLAIN = {"BLOCK_N": 16, "STAGES": 4, "num_warps": 4}
_TERMS = 2
# Blocks of 128 columns that a program splits at once.
_MOST_GROUPS = 32


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    return refusal_of_sizes(sizes) or device_refusal(device)


def fp8_expert_gemm(x: Tensor, weight: Tensor, block_scales: Tensor, expert_offsets: Tensor) -> Tensor:
    """As the reference, in two launches that need to know no row count of an expert beforehand."""
    from day0_kernels.fp8_expert_gemm._triton_kernels import prepare_kernel
    from day0_kernels.triton_tiles import new_tiles, padded_experts

    rows, (experts, outputs, depth) = len(x), weight.shape
    beyond = refusal_of_sizes({"E": experts, "Dout": outputs, "Din": depth})
    if beyond is not None:
        raise ValueError(beyond)
    out = x.new_empty(rows, outputs)
    if rows == 0:
        return out
    chosen = configuration(__file__, x.device, "product", -(-rows // experts), _PLAIN)
    tiles = new_tiles(expert_offsets, rows, tile_rows_of(chosen))
    blocks = -(-depth // BLOCK)
    terms = x.new_empty(rows, _TERMS * depth, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, blocks, dtype=torch.float32)
    prepare_kernel[(rows + len(tiles),)](
        x.contiguous(),
        expert_offsets.contiguous(),
        terms,
        scales,
        tiles,
        rows,
        K=depth,
        E=experts,
        E_PAD=padded_experts(experts),
        TILE_ROWS=tile_rows_of(chosen),
        GROUPS=min(_MOST_GROUPS, 1 << (blocks - 1).bit_length()),
        num_warps=4,
    )
    launch_product(terms, scales, weight, block_scales, tiles, out, chosen)
    return out
