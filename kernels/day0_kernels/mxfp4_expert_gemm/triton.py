"""The grouped expert product on MXFP4 weights on an NVIDIA GPU; device code in `_triton_kernels`, sizes in `sm_*.json`.

Rows of x become two e4m3 terms and a power of two each, which holds every bfloat16 within 2^-9 of
the row's largest exactly, and what is smaller to 2^-17 of the largest. Weights and their scales are exact. So the only
rounding is that of sums, and the result is as good as a bfloat16 product's. Up to the scale byte 236 no sum of 8,192
columns leaves float32, whatever x; what does leave it is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal, multiprocessors

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("bfloat16",))

_PLAIN = {"BLOCK_M": 64, "BLOCK_N": 16, "STAGES": 3, "UNROLL": 1, "num_warps": 4}
_TERMS = 2
_SCALE_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Columns of a row that a program splits without reading them twice.
_MOST_AT_ONCE = 8192
# The map of tiles is made by programs that look at every expert at once.
_MOST_EXPERTS = 4096
# Columns that a tile of the copy engine's rows of terms has.
_BLOCK = 128


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    if sizes.get("E", 0) > _MOST_EXPERTS:
        return f"E must be at most {_MOST_EXPERTS}, is {sizes['E']}"
    if sizes.get("Din", 0) % 32:
        return f"Din must be a multiple of 32, is {sizes['Din']}"
    return device_refusal(device)


def mxfp4_expert_gemm(x: Tensor, codes: Tensor, scales: Tensor, expert_offsets: Tensor) -> Tensor:
    """As the reference, in two launches that need to know no row count of an expert beforehand."""
    from day0_kernels.mxfp4_expert_gemm._triton_kernels import prepare_kernel

    (rows, depth), (experts, outputs, _) = x.shape, codes.shape
    out = x.new_empty(rows, outputs)
    if rows == 0:
        return out
    chosen = _chosen(x, -(-rows // experts), depth, outputs)
    width = chosen["BLOCK_N"]
    terms = x.new_empty(rows * _TERMS, depth, dtype=torch.float8_e4m3fn)
    row_scales = x.new_empty(rows, dtype=torch.float32)
    # An expert with rows has at most one tile that is not full.
    tiles = expert_offsets.new_empty(min(rows, experts) + rows // width, 4)
    live = expert_offsets.new_empty(1)
    prepare_kernel[(rows + len(tiles),)](
        x.contiguous(),
        expert_offsets.contiguous(),
        terms,
        row_scales,
        tiles,
        live,
        rows,
        K=depth,
        E=experts,
        E_PAD=1 << (experts - 1).bit_length(),
        TERMS=_TERMS,
        BLOCK_N=width,
        BLOCK_K=min(_MOST_AT_ONCE, 1 << (depth - 1).bit_length()),
        num_warps=8,
    )
    weights = codes.contiguous(), scales.contiguous()
    if "WIDE" in chosen:
        few_rows(terms, row_scales, *weights, tiles, live, out, chosen)
    else:
        _any_rows(terms, row_scales, *weights, tiles, out, chosen)
    return out


def _chosen(x: Tensor, rows_an_expert: int, depth: int, outputs: int) -> dict[str, int]:
    """A configuration: of `few_rows_kernel` where there is one and its sizes fit, else of `product_kernel`."""
    # Tensors on the CPU mean the interpreter, which has no Hopper.
    if x.device.type != "cpu":
        few = configuration(__file__, x.device, "few_rows", rows_an_expert, {})
        if few and depth % (_BLOCK * few["WIDE"]) == 0 and outputs % few["BLOCK_M"] == 0:
            return dict(few)
    return dict(configuration(__file__, x.device, "product", rows_an_expert, _PLAIN))


def _any_rows(
    terms: Tensor,
    row_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    tiles: Tensor,
    out: Tensor,
    chosen: Mapping[str, int],
) -> None:
    from day0_kernels.mxfp4_expert_gemm._triton_kernels import product_kernel

    outputs, depth = codes.shape[1], codes.shape[2] * 2
    groups = next(size for size in (4, 2, 1) if depth % (32 * size) == 0)
    product_kernel[(-(-outputs // chosen["BLOCK_M"]), len(tiles))](
        terms,
        row_scales,
        codes,
        scales.view(_SCALE_WORDS[groups]),
        tiles,
        out,
        K=depth,
        DOUT=outputs,
        TERMS=len(terms) // len(out),
        GROUPS=groups,
        **chosen,
    )


def few_rows(
    terms: Tensor,
    row_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    tiles: Tensor,
    live: Tensor,
    out: Tensor,
    chosen: Mapping[str, int],
) -> None:
    """Launches `few_rows_kernel`; `terms` e4m3 `[N * TERMS, Din]`, `tiles` and `live` as of `prepare_kernel`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from day0_kernels.mxfp4_expert_gemm._gluon_kernels import few_rows_kernel

    experts, outputs, half = codes.shape
    width, count = 64 * chosen["WIDE"], len(terms) // len(out)
    sizes = {key: value for key, value in chosen.items() if key != "PROGRAMS"}
    few_rows_kernel[(chosen["PROGRAMS"] * multiprocessors(codes.device),)](
        TensorDescriptor.from_tensor(terms, [count * chosen["BLOCK_N"], _BLOCK], gl.NVMMASharedLayout(_BLOCK, 8)),
        row_scales,
        TensorDescriptor.from_tensor(
            codes.view(experts * outputs, half), [chosen["BLOCK_M"], width], gl.NVMMASharedLayout(min(width, _BLOCK), 8)
        ),
        scales.view(torch.int32),
        tiles,
        out,
        live,
        K=2 * half,
        DOUT=outputs,
        TERMS=count,
        **sizes,
    )
