"""The ordinary matrix products of a definition: independent of what else is in the batch, and few; knows no family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from day0_kernels import row_invariant


def join_weights(*weights: nn.Parameter) -> torch.Tensor:
    """Weights [outputs, inputs] of products of the same input -> one weight, theirs behind each other.

    The parameters become views of it: names, shapes and values stay upstream's, and no weight is held twice. None of
    them may be replaced or moved afterwards.
    """
    joined = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return joined


def bind_linears(model: nn.Module) -> None:
    """Runs every `nn.Linear` of `model` through the row-invariant product; weights and names stay as they are.

    Modules with a `join_products` make one of those of their products that read the same input.

    On a CPU the library picks its kernel by the number of rows, and with it the last bits of each row: the same
    sequence would then get other logits next to other neighbours.
    """
    for module in model.modules():
        join: Any = getattr(module, "join_products", None)
        if join is not None:
            join()
        if type(module) is nn.Linear:
            # An attribute of this object only: the class, its parameters and their names stay upstream's.
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
    if torch.cuda.is_initialized():
        # What joined weights were copied from has sizes that nothing else will ask for.
        torch.cuda.empty_cache()


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return row_invariant.linear(x, module.weight, module.bias)


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, K] times each head's weight [H, K, N] -> [T, H, N], row by row independent on a CPU."""
    tokens, heads, depth = x.shape
    if x.device.type != "cpu":
        # Written where it belongs: what reads it next wants the heads of a token together.
        out = x.new_empty(tokens, heads, weight.shape[2])
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out
    tiles = row_invariant.tiles(x.reshape(tokens, heads * depth)).view(-1, row_invariant.TILE_ROWS, heads, depth)
    out = torch.cat([row_invariant.bmm(tile.transpose(0, 1), weight) for tile in tiles], dim=1)
    return out.transpose(0, 1)[:tokens]


def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of a batch's parts, one part behind the other; one part alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
