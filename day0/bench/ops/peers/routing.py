"""Rows of tokens over experts at random, sorted by expert, and packed weights: inputs of the expert products."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from day0.bench.ops.peers.peer import relative_error

TOP = 8
EXPERTS, HIDDEN, WIDTH = 288, 4096, 2048


@dataclass(frozen=True, slots=True)
class Product:
    """A grouped product: `outputs` x `depth` weights of each expert, and tokens of which each has eight rows."""

    outputs: int
    depth: int
    tokens: int

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Read from a name such as `GLM up, 32 tokens`."""
        found = re.search(r"\b(up|down)\b.*?\b([\d,]+) tok", name)
        if found is None:
            return None
        tokens = int(found[2].replace(",", ""))
        return cls(2 * WIDTH, HIDDEN, tokens) if found[1] == "up" else cls(HIDDEN, WIDTH, tokens)


class Routing:
    """`owners[i]` is the expert of row i; `counts` and `offsets` are of the experts."""

    def __init__(self, tokens: int) -> None:
        chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP, 1).indices.flatten()
        self.owners = chosen.sort().values
        self.counts = torch.bincount(self.owners, minlength=EXPERTS)
        self.offsets = torch.cat((self.counts.new_zeros(1), self.counts.cumsum(0)))
        self.rows, self.active = len(self.owners), int((self.counts > 0).sum())

    @property
    def places(self) -> Tensor:
        """Of each row, its place among the rows of its expert."""
        return torch.arange(self.rows, device="cuda") - self.offsets[self.owners]

    def size_bytes(self, product: Product, weight_bytes: float) -> float:
        """Weights of the experts that have rows, e4m3 rows in, bfloat16 rows out."""
        weights = self.active * product.outputs * product.depth * weight_bytes
        return weights + self.rows * (product.depth + 2 * product.outputs)

    def flops(self, product: Product) -> float:
        """Of all rows."""
        return 2.0 * self.rows * product.outputs * product.depth

    def error(self, row: Callable[[int], Tensor], weight: Callable[[int], Tensor]) -> Callable[[Tensor], float]:
        """What compares the first, the last and a row of the largest expert with float32 products."""
        largest = int(self.offsets[int(self.counts.argmax())])
        some = sorted({0, largest, self.rows - 1})
        wanted = [weight(int(self.owners[i])) @ row(i) for i in some]

        def worst(out: Tensor) -> float:
            if not bool(out.sum().isfinite()):
                return float("inf")
            return max(relative_error(out[i], want) for i, want in zip(some, wanted, strict=True))

        return worst


def packed_weights(product: Product) -> tuple[Tensor, Tensor]:
    """Random MXFP4: codes `[E, N, K / 2]`, low nibble first, and scale bytes `[E, N, K / 32]`, uint8."""
    codes = torch.randint(0, 256, (EXPERTS, product.outputs, product.depth // 2), dtype=torch.uint8, device="cuda")
    shape = (EXPERTS, product.outputs, product.depth // 32)
    return codes, torch.randint(118, 124, shape, dtype=torch.uint8, device="cuda")
