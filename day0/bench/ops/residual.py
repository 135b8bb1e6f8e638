"""Hyper-connections and attention over earlier outputs at model sizes, held against float32; it times nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for
from day0_kernels.attention_residual import reference as residual_reference
from day0_kernels.attention_residual import triton as residual
from day0_kernels.hyper_connection import reference as hyper_reference
from day0_kernels.hyper_connection import triton as hyper

STREAMS, HIDDEN, SOURCES = 4, 4096, 9
MIXED = (2 + STREAMS) * STREAMS
MIXING: dict[str, Any] = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 20}
ATTENDING: dict[str, Any] = {"logit_scale": 1.0, "norm_eps": 1e-6, "normed_values": False}
LAYER_NORM_EPS = 1e-5
# Relative to float32. Rounding an output to bfloat16 alone has 1.66e-3; a norm rounds three times.
LIMIT, NORMED_LIMIT = 2.5e-3, 4e-3


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite where got is not finite."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm()) if bool(got.isfinite().all()) else math.inf


def _some(tokens: int) -> list[int]:
    return sorted({0, tokens // 2, tokens - 1})


def pre_shape(tokens: int, normed: bool) -> Shape:
    """Streams `[T, 4, 4096]` to the mixing weights and the sub-layer's input, with or without its norm."""
    fn = torch.randn(MIXED, STREAMS * HIDDEN, device="cuda") * (STREAMS * HIDDEN) ** -0.5
    base, scale = torch.randn(MIXED, device="cuda"), torch.ones(3, device="cuda")
    norm_weight = (1 + 0.1 * torch.randn(HIDDEN, device="cuda")).bfloat16()
    size_bytes = tokens * HIDDEN * 2 * (STREAMS + 1) + fn.nbytes
    sets = [_normal(tokens, STREAMS, HIDDEN) for _ in range(sets_for(size_bytes))]
    some = _some(tokens)

    def call(module: Any, streams: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if normed:
            found = module.hc_pre_norm(streams, fn, base, scale, weight, **MIXING, layer_norm_eps=LAYER_NORM_EPS)
        else:
            found = module.hc_pre(streams, fn, base, scale, **MIXING)
        return tuple(found)

    def error(found: tuple[Tensor, ...]) -> float:
        wanted = call(hyper_reference, sets[0][some].float(), norm_weight.float())
        return max(_relative(got[some], want) for got, want in zip(found, wanted, strict=True))

    return Shape(
        "hc_pre_norm" if normed else "hc_pre",
        f"{tokens:,} tokens",
        [partial(call, hyper, streams, norm_weight) for streams in sets],
        size_bytes,
        error,
        NORMED_LIMIT if normed else LIMIT,
        2.0 * tokens * fn.numel(),
    )


def post_shape(tokens: int) -> Shape:
    """Streams `[T, 4, 4096]` and a sub-layer's output to the next streams."""
    size_bytes = tokens * HIDDEN * 2 * (2 * STREAMS + 1)
    post, comb = torch.rand(tokens, STREAMS, device="cuda"), torch.rand(tokens, STREAMS, STREAMS, device="cuda")
    sets = [(_normal(tokens, STREAMS, HIDDEN), _normal(tokens, HIDDEN)) for _ in range(sets_for(size_bytes))]
    some = _some(tokens)

    def error(found: Tensor) -> float:
        streams, out = sets[0]
        wanted = hyper_reference.hc_post(streams[some].float(), out[some].float(), post[some], comb[some])
        return _relative(found[some], wanted)

    calls = [partial(hyper.hc_post, streams, out, post, comb) for streams, out in sets]
    return Shape("hc_post", f"{tokens:,} tokens", calls, size_bytes, error, LIMIT)


def residual_shape(tokens: int, hidden: int, sources: int = SOURCES) -> Shape:
    """A bank `[N, T, D]` of earlier block outputs and one query."""
    query = torch.randn(1, hidden, device="cuda") * hidden**-0.5
    size_bytes = tokens * (sources + 1) * hidden * 2 + query.nbytes
    sets = [_normal(sources, tokens, hidden).transpose(0, 1) for _ in range(sets_for(size_bytes))]
    some = _some(tokens)

    def error(found: Tensor) -> float:
        return _relative(found[some], residual_reference.attention_residual(sets[0][some].float(), query, **ATTENDING))

    calls = [partial(residual.attention_residual, bank, query, **ATTENDING) for bank in sets]
    return Shape(
        "attention_residual", f"{tokens:,} tokens, {sources} sources of {hidden}", calls, size_bytes, error, LIMIT
    )


def shapes() -> Iterator[Callable[[], Shape]]:
    """Prefill and decode sizes: mHC with 4 streams of 4096, AttnRes with 9 sources of 4096 and of 7168."""
    for tokens in (1, 128, 4096):
        yield partial(pre_shape, tokens, False)
        yield partial(pre_shape, tokens, True)
        yield partial(post_shape, tokens)
    for hidden in (4096, 7168):
        for tokens in (1, 128, 4096):
            yield partial(residual_shape, tokens, hidden)
