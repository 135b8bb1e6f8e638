"""Inputs and the float32 definition of index scores at model sizes; it calls no peer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from day0.bench.ops.peers.peer import random_fp8
from day0.bench.ops.timing import sets_for

KEY_DIM, BLOCK, TOPK = 128, 64, 2048
# 128 e4m3 and one float32 scale.
KEY_BYTES = KEY_DIM + 4


@dataclass(frozen=True, slots=True)
class Size:
    """What a shape's name says: indexer heads, keys to score, sequences (0 for a prefill of 4,096 tokens), choices."""

    heads: int
    keys: int
    batch: int
    chosen: int

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Read from a name such as `32 heads, 128k, batch 32` or `64 heads, 4k x 64k`, `pools of 16` in it or not."""
        heads, batch = re.search(r"(\d+) heads", name), re.search(r"batch (\d+)", name)
        contexts = re.findall(r"(\d+)k\b", name)
        pool = re.search(r"pools? of (\d+)|pool (\d+)", name)
        if heads is None or not contexts:
            return None
        size = int(pool[1] or pool[2]) if pool else 1
        return cls(int(heads[1]), int(contexts[-1]) * 1024 // size, int(batch[1]) if batch else 0, TOPK // size)


def definition(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    """q `[n, H, 128]`, keys `[S, 128]`, scales `[S]`, weights `[n, H]` -> float32 `[n, S]`."""
    scores = torch.einsum("nhd,sd->nhs", q.float(), keys.float()).relu()
    return (scores * weights[..., None]).sum(1) * scales


class PrefillInputs:
    """4,096 queries at the end of a context of `keys`, each seeing what is before it."""

    tokens = 4096

    def __init__(self, size: Size) -> None:
        self.size = size
        tokens = self.tokens
        self.q, self.keys = random_fp8(tokens, size.heads, KEY_DIM), random_fp8(size.keys, KEY_DIM)
        self.scales = torch.rand(size.keys, device="cuda") + 0.5
        self.weights = torch.rand(tokens, size.heads, device="cuda")
        self.start = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        # One key may stand for several tokens; the last query sees them all.
        visible = torch.arange(1, tokens + 1, device="cuda") - tokens + size.keys
        self.end = visible.clamp(min=1).int()

    @property
    def pairs(self) -> float:
        """Scores that must be computed."""
        return float(self.end.sum())

    @property
    def size_bytes(self) -> float:
        """Queries, keys and float32 scores."""
        return self.tokens * self.size.heads * KEY_BYTES + self.size.keys * KEY_BYTES + 4 * self.pairs

    @property
    def flops(self) -> float:
        """Products of queries and keys."""
        return 2.0 * self.size.heads * KEY_DIM * self.pairs


class DecodeInputs:
    """One query of each of `batch` sequences over keys in blocks, in as many sets as do not stay in L2."""

    def __init__(self, size: Size) -> None:
        self.size = size
        batch, keys = size.batch, size.keys
        self.size_bytes = batch * (keys * KEY_BYTES + size.heads * KEY_BYTES + keys * 4)
        self.flops = 2.0 * size.heads * KEY_DIM * batch * keys
        sets, blocks = sets_for(self.size_bytes), keys // BLOCK
        self.cache = torch.empty(sets * batch * blocks, BLOCK * KEY_BYTES, dtype=torch.uint8, device="cuda")
        for part in self.cache.split(1 << 14):
            part[:, : BLOCK * KEY_DIM] = random_fp8(len(part), BLOCK * KEY_DIM).view(torch.uint8)
            part[:, BLOCK * KEY_DIM :] = (torch.rand(len(part), BLOCK, device="cuda") + 0.5).view(torch.uint8)
        ids = torch.randperm(len(self.cache), device="cuda").int().view(sets, batch, blocks)
        self.lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        self.sets = [
            (random_fp8(batch, 1, size.heads, KEY_DIM), torch.rand(batch, size.heads, device="cuda"), ids[i])
            for i in range(sets)
        ]

    def wanted(self, row: int) -> Tensor:
        """Float32 scores of one sequence of the first set, `[keys]`."""
        q, weights, table = self.sets[0]
        block = self.cache[table[row].long()]
        keys = block[:, : BLOCK * KEY_DIM].reshape(self.size.keys, KEY_DIM).view(torch.float8_e4m3fn)
        scales = block[:, BLOCK * KEY_DIM :].contiguous().view(torch.float32).reshape(self.size.keys)
        return definition(q[row], keys, scales, weights[row : row + 1])[0]
