"""Liger's AttnRes and hyper-connections, their forward passes alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from day0.bench.ops.peers import residuals
from day0.bench.ops.peers.peer import Peer, installed, load
from day0.bench.ops.peers.residuals import EPS, SINKHORN_ROUNDS
from day0.bench.ops.shape import Shape

MODULE = "liger_kernel"
MANY_TOKENS = 1024


def attention_residual(size: residuals.Size, name: str) -> Shape:
    """One query over the sources."""
    forward, made = load("liger_kernel.ops.attn_res").attn_res_forward, residuals.Sources(size)

    def call(sources: Tensor) -> Tensor:
        out: Tensor = forward(sources, made.query, made.one, EPS)[0]
        return out

    return made.shape(name, call)


def pre(size: residuals.Size, operator: str, name: str) -> Shape:
    """Three kernels: product with the norm, coefficients, weighted sum."""
    mhc, made = load("liger_kernel.ops.mhc"), residuals.Streams(size)
    weight, one = made.weight.bfloat16(), made.factor

    def call(x: Tensor) -> tuple[Any, Any, Any]:
        mixed, _ = mhc.mhc_mm_norm_fwd(x.view(len(x), -1), weight, eps=EPS)
        before, after, comb = mhc.mhc_split_sinkhorn_fwd(
            mixed, made.base, one, one, one, tmax=SINKHORN_ROUNDS, pre_eps=EPS, sinkhorn_eps=EPS, post_mult=2.0
        )
        return mhc.mhc_pre_fwd(x, before), after, comb

    return made.pre_shape(operator, name, call)


def post(size: residuals.Size, name: str) -> Shape:
    """New streams from old ones and the layer's output."""
    return residuals.Streams(size).post_shape(name, load("liger_kernel.ops.mhc").mhc_post_res_fwd)


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of AttnRes and hyper-connections."""
    if not installed(MODULE):
        return
    if (sources := residuals.Size.of_sources(operator, shape)) is not None:
        yield Peer(MODULE, "attn_res_forward", partial(attention_residual, sources, shape))
    streams = residuals.Size.of_streams(operator, shape)
    # Its kernels take the number of tokens as a constant and compile for half a minute each time.
    if operator == "hc_pre" and streams is not None and streams.tokens >= MANY_TOKENS:
        note = "bf16 weight, float32 out"
        yield Peer(MODULE, "mhc coefficients and pre", partial(pre, streams, operator, shape), note)
    if operator == residuals.AFTER and streams is not None:
        yield Peer(MODULE, "mhc_post_res_fwd", partial(post, streams, shape), "float32 out")
