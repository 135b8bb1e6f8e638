"""The grouped expert product on MXFP4 weights on an NVIDIA GPU; device code in `_triton_kernels`, sizes in `sm_*.json`.

Rows of x become two e4m3 terms (four for float16) and a power of two each, which holds every bfloat16 within 2^-9 of
the row's largest exactly, and what is smaller to 2^-17 of the largest. Weights and their scales are exact. So the only
rounding is that of sums, and the result is as good as a bfloat16 product's. Up to the scale byte 236 no sum of 8,192
columns leaves float32, whatever x; what does leave it is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("bfloat16", "float16"))

_PLAIN = {"BLOCK_M": 64, "BLOCK_N": 16, "STAGES": 3, "UNROLL": 1, "num_warps": 4}
_TERMS = {torch.bfloat16: 2, torch.float16: 4}
_SCALE_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Columns of a row that a program splits without reading them twice.
_MOST_AT_ONCE = 8192
# The map of tiles is made by programs that look at every expert at once.
_MOST_EXPERTS = 4096


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    if sizes.get("E", 0) > _MOST_EXPERTS:
        return f"E must be at most {_MOST_EXPERTS}, is {sizes['E']}"
    if sizes.get("Din", 0) % 32:
        return f"Din must be a multiple of 32, is {sizes['Din']}"
    return device_refusal(device)


def mxfp4_expert_gemm(x: Tensor, codes: Tensor, scales: Tensor, expert_offsets: Tensor) -> Tensor:
    """As the reference, in two launches that need to know no row count of an expert beforehand."""
    from day0_kernels.mxfp4_expert_gemm._triton_kernels import prepare_kernel, product_kernel

    (rows, depth), (experts, outputs, _) = x.shape, codes.shape
    out = x.new_empty(rows, outputs)
    if rows == 0:
        return out
    chosen = dict(configuration(__file__, x.device, "product", -(-rows // experts), _PLAIN))
    count = _TERMS[x.dtype]
    # Shared memory is committed for bfloat16; more terms leave room for fewer rows.
    width = chosen["BLOCK_N"] = max(16, chosen["BLOCK_N"] * _TERMS[torch.bfloat16] // count)
    terms = x.new_empty(rows, depth * count, dtype=torch.float8_e4m3fn)
    row_scales = x.new_empty(rows, dtype=torch.float32)
    # An expert with rows has at most one tile that is not full.
    tiles = x.new_empty(min(rows, experts) + rows // width, 4, dtype=torch.int32)
    prepare_kernel[(rows + len(tiles),)](
        x.contiguous(),
        expert_offsets.contiguous(),
        terms,
        row_scales,
        tiles,
        rows,
        K=depth,
        E=experts,
        E_PAD=1 << (experts - 1).bit_length(),
        TERMS=count,
        BLOCK_N=width,
        BLOCK_K=min(_MOST_AT_ONCE, 1 << (depth - 1).bit_length()),
        num_warps=8,
    )
    groups = next(size for size in (4, 2, 1) if depth % (32 * size) == 0)
    product_kernel[(-(-outputs // chosen["BLOCK_M"]), len(tiles))](
        terms,
        row_scales,
        codes.contiguous(),
        scales.contiguous().view(_SCALE_WORDS[groups]),
        tiles,
        out,
        K=depth,
        DOUT=outputs,
        TERMS=count,
        GROUPS=groups,
        **chosen,
    )
    return out
