"""Makes the ordinary matrix products of a definition independent of what else is in the batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from day0_kernels import row_invariant


def bind_linears(model: nn.Module) -> None:
    """Runs every `nn.Linear` of `model` through the row-invariant product; weights and names stay as they are.

    On a CPU the library picks its kernel by the number of rows, and with it the last bits of each row: the same
    sequence would then get other logits next to other neighbours.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            # An attribute of this object only: the class, its parameters and their names stay upstream's.
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return row_invariant.linear(x, module.weight, module.bias)


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, K] times each head's weight [H, K, N] -> [T, H, N], row by row independent on a CPU."""
    if x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    tokens, heads, depth = x.shape
    tiles = row_invariant.tiles(x.reshape(tokens, heads * depth)).view(-1, row_invariant.TILE_ROWS, heads, depth)
    out = torch.cat([row_invariant.bmm(tile.transpose(0, 1), weight) for tile in tiles], dim=1)
    return out.transpose(0, 1)[:tokens]
