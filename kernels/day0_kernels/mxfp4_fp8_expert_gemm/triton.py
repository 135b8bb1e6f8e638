"""The grouped product of FP8 rows and MXFP4 weights on an NVIDIA GPU; sizes in `sm_*.json`, several kernels share it.

With `by_group` each group of 32 columns is scaled by itself, in the kernel that `mxfp4_expert_gemm` has for few rows.
Without, `_gluon_many` and `_gluon_few` (Hopper) multiply weight rows whose groups can share one exponent (`tops` below
255), and leave whole tiles of them that cannot to `_triton_kernels`, which goes group by group. Which of them has a
weight row does not depend on the batch, and neither does the order in which a row's products are added up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal, multiprocessors

BACKEND = Backend("triton", PRIORITY, devices=("cuda",))

_BLOCK = 128
# Columns of a round of the common kernel.
_ROUND = 256
# Tiles where no committed configuration is: rows of x alone are chosen, the common kernel does not run.
_PLAIN = {"BLOCK_N": 16}
_GROUP = {"BLOCK_M": 64, "BLOCK_N": 16, "num_warps": 4}
# Weight rows that are multiplied one way together, whatever the batch: all by a common exponent, or all by groups.
_SHARED_ROWS = 256
_TOPS_AT_ONCE = 4096
_REORDERED_AT_ONCE = 2048
# The map of tiles is made by programs that look at every expert at once.
_MOST_EXPERTS = 4096


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    if sizes.get("E", 0) > _MOST_EXPERTS:
        return f"E must be at most {_MOST_EXPERTS}, is {sizes['E']}"
    if sizes.get("Din", 0) % _BLOCK:
        return f"Din must be a multiple of {_BLOCK}, is {sizes['Din']}"
    return device_refusal(device)


def mxfp4_fp8_expert_gemm(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    tops: Tensor,
    expert_offsets: Tensor,
    *,
    by_group: bool,
) -> Tensor:
    """As the reference, in launches that need to know no row count of an expert beforehand."""
    from day0_kernels.mxfp4_fp8_expert_gemm._triton_kernels import group_kernel, map_kernel
    from day0_kernels.triton_tiles import new_tiles, padded_experts

    (rows, depth), (experts, outputs, _) = x.shape, codes.shape
    if depth % _BLOCK:
        raise ValueError(f"Din must be a multiple of {_BLOCK}, is {depth}")
    out = x.new_empty(rows, outputs, dtype=torch.bfloat16)
    if rows == 0:
        return out
    chosen = _chosen(x.device, -(-rows // experts), depth, outputs, by_group)
    tile_rows = chosen["BLOCK_N"]
    tiles, live = new_tiles(expert_offsets, rows, tile_rows), expert_offsets.new_empty(1)
    map_kernel[(len(tiles),)](
        expert_offsets.contiguous(),
        tops.contiguous(),
        tiles,
        live,
        E=experts,
        E_PAD=padded_experts(experts),
        TILE_ROWS=tile_rows,
        DOUT=outputs,
        BLOCK_D=min(_TOPS_AT_ONCE, 1 << (outputs - 1).bit_length()),
        num_warps=4,
    )
    held, row_scales = x.contiguous().view(torch.float8_e4m3fn), x_scales.contiguous()
    weights = codes.contiguous(), scales.contiguous(), tops.contiguous()
    if "WIDE" in chosen:
        _few_rows(held, row_scales, *weights[:2], tiles, live, out, chosen)
        return out
    if "REGISTERS" in chosen:
        _many_rows(held, row_scales, *weights, tiles, live, out, chosen)
    elif "BLOCK_M" in chosen:
        from day0_kernels.mxfp4_fp8_expert_gemm._gluon_few import common_kernel

        grid = (outputs // chosen["BLOCK_M"], len(tiles))
        common_kernel[grid](held, row_scales, *weights, tiles, out, K=depth, DOUT=outputs, **chosen)
    # Behind the other kernel, whose results for rows without a common exponent it replaces.
    shared = _SHARED_ROWS if "BLOCK_M" in chosen else 0
    group_kernel[(-(-outputs // (shared or _GROUP["BLOCK_M"])), len(tiles))](
        held, row_scales, *weights, tiles, out, K=depth, DOUT=outputs, SHARED_M=shared, TILE_ROWS=tile_rows, **_GROUP
    )
    return out


def _chosen(device: torch.device, rows_an_expert: int, depth: int, outputs: int, by_group: bool) -> Mapping[str, int]:
    """A configuration of a kernel for Hopper where its sizes fit, or `_PLAIN`: `group_kernel` does it all."""
    # Tensors on the CPU mean the interpreter, which has no Hopper.
    if device.type != "cpu" and depth % _ROUND == 0 and outputs % _SHARED_ROWS == 0:
        found = configuration(__file__, device, "by_group" if by_group else "common", rows_an_expert, _PLAIN)
        if depth % (_BLOCK * found.get("WIDE", 1)) == 0:
            return found
    return _PLAIN


def _few_rows(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    tiles: Tensor,
    live: Tensor,
    out: Tensor,
    chosen: Mapping[str, int],
) -> None:
    from day0_kernels.mxfp4_expert_gemm.triton import few_rows
    from day0_kernels.mxfp4_fp8_expert_gemm._triton_kernels import reorder_kernel

    terms = torch.empty_like(x)
    reorder_kernel[(len(x),)](
        x.view(torch.uint8), terms.view(torch.uint8), K=x.shape[1], BLOCK_K=_REORDERED_AT_ONCE, num_warps=4
    )
    few_rows(terms, x_scales, codes, scales, tiles, live, out, chosen)


def _many_rows(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    tops: Tensor,
    tiles: Tensor,
    live: Tensor,
    out: Tensor,
    chosen: Mapping[str, int],
) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from day0_kernels.mxfp4_fp8_expert_gemm._gluon_many import many_rows_kernel

    experts, outputs, half = codes.shape
    lines = codes.view(experts * outputs, half)
    many_rows_kernel[(multiprocessors(x.device),)](
        TensorDescriptor.from_tensor(x, [chosen["BLOCK_N"], _BLOCK], gl.NVMMASharedLayout(_BLOCK, 8)),
        x_scales,
        TensorDescriptor.from_tensor(lines, [2 * chosen["BLOCK_M"], _BLOCK // 2], gl.NVMMASharedLayout(_BLOCK // 2, 8)),
        scales,
        tops,
        tiles,
        out,
        live,
        K=2 * half,
        DOUT=outputs,
        **chosen,
    )
