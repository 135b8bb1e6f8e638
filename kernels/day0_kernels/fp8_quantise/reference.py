"""Definition of the quantisation of rows to FP8; it does not know what the rows are multiplied with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)

MXFP4_BLOCK = 128
# As biased float32 exponents: scale and inverse stay normal numbers.
_EXPONENTS = (8, 254)


def fp8_quantise(x: Tensor, *, group: int, mxfp4_order: bool) -> tuple[Tensor, Tensor]:
    """`q` uint8 `[N, Din]` (e4m3fn bits) and `x_scales` float32 `[N, ceil(Din / group)]` of `x [N, Din]`.

    `x_scales` are the powers of two that bring the largest magnitude of `group` columns (128, or Din) to 128 .. 256; a
    group of zeros has the smallest. With `mxfp4_order` each 128 columns of `q` are in the order of `to_mxfp4_order`.
    An infinity or NaN becomes NaN (0x7F), and the rest of its group nearly zero. ValueError for another `group`, and
    for a Din that is no multiple of 128 where `mxfp4_order` is asked for.
    """
    columns = x.shape[1]
    if group not in (MXFP4_BLOCK, columns):
        raise ValueError(f"group must be {MXFP4_BLOCK} or all {columns} columns, is {group}")
    wide = pad(x.float(), (0, -columns % group)).unflatten(1, (-1, group))
    exponent = (wide.view(torch.int32) & 0x7FFFFFFF).amax(2) >> 23
    exponent = exponent.clamp(*_EXPONENTS)
    scaled = wide * ((261 - exponent) << 23).view(torch.float32).unsqueeze(2)
    bits = scaled.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(~(scaled.abs() < 512), 0x7F)
    q = bits.flatten(1)[:, :columns]
    return (to_mxfp4_order(q) if mxfp4_order else q.contiguous()), ((exponent - 7) << 23).view(torch.float32)


def to_mxfp4_order(q: Tensor) -> Tensor:
    """Columns of `[N, Din]` as the MXFP4 product takes them: of 128, column (t, s, h, b) goes to place (s, h, t, b).

    t, s, h, b count 4, 4, 2, 4. So a thread of the product that holds the 16 code bytes of one group t of 32 columns
    has, in each step s of 32 places, what the matrix instruction wants of it. ValueError where Din % 128 is not 0.
    """
    if q.shape[1] % MXFP4_BLOCK:
        raise ValueError(f"Din must be a multiple of {MXFP4_BLOCK} for the MXFP4 order, is {q.shape[1]}")
    return q.unflatten(1, (-1, 4, 4, 2, 4)).permute(0, 1, 3, 4, 2, 5).flatten(1).contiguous()


def from_mxfp4_order(q: Tensor) -> Tensor:
    """The columns in their own order again."""
    return q.unflatten(1, (-1, 4, 2, 4, 4)).permute(0, 1, 4, 2, 3, 5).flatten(1).contiguous()
