"""Launches the grouped products of e4m3 rows and e4m3 weights; it knows no operator, imports Triton when it must."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 128
# The map of tiles is made by programs that look at every expert at once.
MOST_EXPERTS = 4096
# The copy engine's rows begin at multiples of 16 bytes and its coordinates are int32.
ROW_BYTES = 16
MOST_WEIGHT_ROWS = 2**31 - 1


def refusal_of_sizes(sizes: Mapping[str, int]) -> str | None:
    """Why these sizes (E, Dout, Din, where known) cannot be served, or None."""
    if sizes.get("E", 0) > MOST_EXPERTS:
        return f"E must be at most {MOST_EXPERTS}, is {sizes['E']}"
    if sizes.get("Din", 0) % ROW_BYTES:
        return f"Din must be a multiple of {ROW_BYTES}, is {sizes['Din']}"
    weight_rows = sizes.get("E", 0) * sizes.get("Dout", 0)
    return f"E * Dout must be at most {MOST_WEIGHT_ROWS}, is {weight_rows}" if weight_rows > MOST_WEIGHT_ROWS else None


def tile_rows_of(chosen: Mapping[str, int]) -> int:
    """Rows of a tile: of the kernel for many rows an expert `BLOCK_M`, of the one for few `BLOCK_N`."""
    return chosen.get("BLOCK_M") or chosen["BLOCK_N"]


def launch_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    block_scales: Tensor,
    tiles: Tensor,
    out: Tensor,
    chosen: Mapping[str, int],
) -> None:
    """Fills `out [N, Dout]` from e4m3fn bits `x [N, terms * Din]`, N above 0, and `weight [E, Dout, Din]`.

    `x_scales` float32 `[N, ceil(Din / 128)]` and `tiles` are contiguous; `chosen` is a configuration whose `BLOCK_M`
    asks for the kernel for many rows an expert and whose `BLOCK_N` for the one for few.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from day0_kernels.triton_e4m3_product import few_rows_kernel, many_rows_kernel

    experts, outputs, depth = weight.shape
    rows, width = x.shape
    held = x.view(torch.float8_e4m3fn)
    bits = weight.contiguous().view(torch.float8_e4m3fn).view(experts * outputs, depth)
    rest = (x_scales, TensorDescriptor.from_tensor(bits, [BLOCK, BLOCK]), block_scales.contiguous(), tiles, out)
    sizes = {"K": depth, "DOUT": outputs, "TERMS": width // depth}
    if "BLOCK_M" in chosen:
        described = TensorDescriptor.from_tensor(held, [chosen["BLOCK_M"], BLOCK])
        grid = (-(-outputs // (BLOCK * chosen["HALVES"])), len(tiles))
        many_rows_kernel[grid](described, *rest, rows, **sizes, **chosen)
    else:
        few_rows_kernel[(-(-outputs // BLOCK), len(tiles))](held, *rest, **sizes, **chosen)
