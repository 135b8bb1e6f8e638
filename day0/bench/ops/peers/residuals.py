"""Inputs and definitions of AttnRes and of hyper-connections as other projects take them; it calls no peer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from day0.bench.ops.peers.peer import normal, relative_error
from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for

STREAMS, HIDDEN, SINKHORN_ROUNDS, EPS = 4, 4096, 20, 1e-6
BEFORE, AFTER = ("hc_pre", "hc_pre_norm"), "hc_post"
COEFFICIENTS = (2 + STREAMS) * STREAMS
LIMIT = 0.02


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens, hidden size, and sources (AttnRes) or streams (hyper-connections)."""

    tokens: int
    hidden: int
    sources: int

    @classmethod
    def _of(cls, name: str, sources: int) -> Self | None:
        tokens, hidden = re.search(r"([\d,]+) tok", name), re.search(r" of (\d+)", name)
        if tokens is None:
            return None
        return cls(int(tokens[1].replace(",", "")), int(hidden[1]) if hidden else HIDDEN, sources)

    @classmethod
    def of_sources(cls, operator: str, name: str) -> Self | None:
        """Of AttnRes, from a name such as `4,096 tokens, 9 sources of 7168`."""
        found = re.search(r"(\d+) sources", name)
        return cls._of(name, int(found[1])) if operator == "attention_residual" and found else None

    @classmethod
    def of_streams(cls, operator: str, name: str) -> Self | None:
        """Of hyper-connections, from a name such as `128 tokens`."""
        return cls._of(name, STREAMS) if operator in (*BEFORE, AFTER) else None


def attend(sources: Tensor, query: Tensor) -> Tensor:
    """out = sum_n softmax_n(rms_norm(x_n) . query) x_n: sources `[N, T, D]`, query `[D]` -> float32 `[T, D]`."""
    x = sources.float()
    weights = (functional.rms_norm(x, x.shape[-1:], eps=EPS) @ query).softmax(0)
    return (weights[..., None] * x).sum(0)


class Sources:
    """Earlier outputs `[N, T, D]`, a query whose norm weight is one, in as many sets as do not stay in L2."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.size_bytes = size.tokens * (size.sources + 1) * size.hidden * 2
        self.query = (torch.randn(size.hidden, device="cuda") * size.hidden**-0.5).bfloat16()
        self.one = torch.ones(size.hidden, dtype=torch.bfloat16, device="cuda")
        self.sets = [normal(size.sources, size.tokens, size.hidden) for _ in range(sets_for(self.size_bytes))]

    def shape(self, name: str, call: Callable[[Tensor], Tensor]) -> Shape:
        tokens = self.size.tokens
        some = sorted({0, tokens // 2, tokens - 1})
        wanted = attend(self.sets[0][:, some], self.query.float())

        def error(out: Tensor) -> float:
            return relative_error(out.reshape(tokens, self.size.hidden)[some], wanted)

        return Shape("attention_residual", name, [partial(call, x) for x in self.sets], self.size_bytes, error, LIMIT)


def coefficients(mixed: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mixed `[T, 24]`, base `[24]` -> pre `[T, 4]`, post `[T, 4]`, comb `[T, 4, 4]`, as mHC defines them."""
    mixed = mixed + base
    comb = torch.softmax(mixed[:, 2 * STREAMS :].view(-1, STREAMS, STREAMS), -1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(SINKHORN_ROUNDS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return torch.sigmoid(mixed[:, :STREAMS]) + EPS, 2 * torch.sigmoid(mixed[:, STREAMS : 2 * STREAMS]), comb


def collapse(streams: Tensor, weight: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """streams `[T, 4, D]`, weight `[4 D, 24]` -> collapsed `[T, D]` in their dtype, post, comb."""
    flat = streams.flatten(1).float()
    mixed = (flat @ weight) * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + EPS)
    pre, post, comb = coefficients(mixed, base)
    return (pre[..., None] * streams.float()).sum(1).to(streams.dtype), post, comb


def spread(streams: Tensor, added: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """new[m] = post[m] * added + sum_n comb[m, n] * streams[n], in the streams' dtype."""
    mixed = (comb[..., None] * streams[:, None].float()).sum(2) + post[..., None] * added[:, None].float()
    return mixed.to(streams.dtype)


class Streams:
    """Residual streams `[T, 4, D]`, what a layer adds `[T, D]`, and the mixing weights."""

    def __init__(self, size: Size) -> None:
        self.size = size
        width = STREAMS * size.hidden
        self.weight = torch.randn(width, COEFFICIENTS, device="cuda") * width**-0.5
        self.base, self.factor = torch.randn(COEFFICIENTS, device="cuda") * 0.3, torch.ones((), device="cuda")
        self.post = torch.rand(size.tokens, STREAMS, device="cuda")
        self.comb = torch.rand(size.tokens, STREAMS, STREAMS, device="cuda")
        read = size.tokens * size.hidden * 2 * (2 * STREAMS + 1)
        self.sets = [
            (normal(size.tokens, STREAMS, size.hidden), normal(size.tokens, size.hidden)) for _ in range(sets_for(read))
        ]
        self._some = sorted({0, size.tokens // 2, size.tokens - 1})

    def pre_shape(self, operator: str, name: str, call: Callable[[Tensor], tuple[Any, Any, Any]]) -> Shape:
        """`call` returns collapsed, post and comb."""
        some, tokens = self._some, self.size.tokens
        out, _, comb = collapse(self.sets[0][0][some].float(), self.weight, self.base)

        def error(found: tuple[Tensor, Tensor, Tensor]) -> float:
            mixing = found[2].reshape(tokens, STREAMS, STREAMS)[some]
            return max(relative_error(found[0][some], out), relative_error(mixing, comb))

        moved = tokens * self.size.hidden * 2 * (STREAMS + 1) + self.weight.nbytes
        calls = [partial(call, x) for x, _ in self.sets]
        return Shape(operator, name, calls, moved, error, LIMIT, 2.0 * tokens * self.weight.numel())

    def post_shape(self, name: str, call: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Shape:
        """`call` takes streams, added, post and comb."""
        some = self._some
        x, added = self.sets[0]
        wanted = spread(x[some].float(), added[some].float(), self.post[some], self.comb[some])
        calls = [partial(call, x, added, self.post, self.comb) for x, added in self.sets]
        moved = self.size.tokens * self.size.hidden * 2 * (2 * STREAMS + 1)
        return Shape(AFTER, name, calls, moved, lambda out: relative_error(out[some], wanted), LIMIT)
