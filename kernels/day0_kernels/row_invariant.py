"""Arithmetic whose bits for one row do not depend on the other rows of the call; it knows no operator.

On a CPU three things break that: a matrix product picks its kernel by the number of rows; a contraction of 384 or
more is split over threads when fewer products than threads run; and vectorised `sigmoid` / `silu` use another formula
for the last elements of a tensor than for the rest. Here every product has a fixed shape (16 rows, at most 256 deep)
and the two functions are built from `exp`, which has one formula. Additions, multiplications, divisions, `exp`,
`rsqrt` and sums along the last dimension were measured to be independent of the neighbours;
`tests/kernels/test_row_invariant.py` fails where that stops being true.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 16
MAX_DEPTH = 256


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Product `a [G, M, K] @ b [G, K, N] -> [G, M, N]`; the bits of one entry depend on M, K and N, never on G.

    The caller keeps M, K and N fixed for a row. `b` may be a broadcast view (stride 0 over G).
    """
    depth = a.shape[-1]
    if a.device.type != "cpu" or depth <= MAX_DEPTH:
        return torch.bmm(a, b)
    total = torch.bmm(a[..., :MAX_DEPTH], b[:, :MAX_DEPTH])
    for start in range(MAX_DEPTH, depth, MAX_DEPTH):
        total += torch.bmm(a[..., start : start + MAX_DEPTH], b[:, start : start + MAX_DEPTH])
    return total


def tiles(x: Tensor) -> Tensor:
    """Rows `[N, D]` as zero-padded tiles `[ceil(N / 16), 16, D]`."""
    rows, width = x.shape
    count = -(-rows // TILE_ROWS)
    if rows == count * TILE_ROWS:
        return x.reshape(count, TILE_ROWS, width)
    padded = x.new_zeros(count * TILE_ROWS, width)
    padded[:rows] = x
    return padded.view(count, TILE_ROWS, width)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [..., Din] @ weight [Dout, Din]^T (+ bias [Dout]) -> [..., Dout]`, row by row independent on a CPU."""
    if x.device.type != "cpu":
        return torch.nn.functional.linear(x, weight, bias)
    # Every side is named: a definition without shared experts has them with no row at all, and -1 could be anything.
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    tiled = tiles(rows)
    product = bmm(tiled, weight.t().expand(len(tiled), -1, -1)).flatten(0, 1)[: len(rows)]
    if bias is not None:
        product = product + bias
    return product.reshape(*x.shape[:-1], weight.shape[0])


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`; exact 0 and 1 far from zero."""
    return torch.reciprocal(torch.exp(-x).add_(1))


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`."""
    return x / torch.exp(-x).add_(1)


def softmax(x: Tensor) -> Tensor:
    """Softmax along the last dimension; a row of -inf gives zeros."""
    peak = x.amax(-1, keepdim=True)
    weights = torch.exp(x - peak.masked_fill(peak == -torch.inf, 0))
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)
