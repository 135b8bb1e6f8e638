"""Plain torch and torch.compile, where nothing better is known or where they are what a model has without any of us."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.peers import deep_gemm, flash_mla, residuals
from day0.bench.ops.peers.peer import Peer
from day0.bench.ops.peers.routing import Product
from day0.bench.ops.shape import Shape

MODULE = "torch"


@cache
def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled once a process, for any length."""
    return torch.compile(fn, dynamic=True)


def gather_attention(q: Tensor, rows: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Sparse attention as gather, product, softmax, product; q `[n, H, R]`, ids int64 `[n, k]`."""
    keys = rows[ids]
    weights = torch.softmax(torch.bmm(q, keys.transpose(1, 2)).float() * scale, -1).to(q.dtype)
    return torch.bmm(weights, keys[..., : flash_mla.VALUE])


def attend_narrow(sources: Tensor, query: Tensor) -> Tensor:
    """AttnRes in the sources' dtype."""
    return residuals.attend(sources, query).to(sources.dtype)


def decode(model: str, context: int, batch: int, name: str) -> Shape:
    """Sparse attention of one query a sequence on bfloat16 rows."""
    made = flash_mla.Decode(model, context, batch, fp8=False)
    attend = compiled(gather_attention)
    made.sets = [(q, ids.long()) for q, ids in made.sets]
    return made.shape(name, lambda q, ids: attend(q[:, 0], made.rows, ids[:, 0], made.scale))


def attention_residual(size: residuals.Size, name: str) -> Shape:
    """AttnRes."""
    made, attend = residuals.Sources(size), compiled(attend_narrow)
    query = made.query.float()
    return made.shape(name, lambda sources: attend(sources, query))


def pre(size: residuals.Size, operator: str, name: str) -> Shape:
    """Hyper-connections before a layer."""
    made, collapse = residuals.Streams(size), compiled(residuals.collapse)
    return made.pre_shape(operator, name, lambda x: collapse(x, made.weight, made.base))


def post(size: residuals.Size, name: str) -> Shape:
    """Hyper-connections after a layer."""
    return residuals.Streams(size).post_shape(name, compiled(residuals.spread))


def scaled_grouped(product: Product, name: str) -> Shape:
    """torch's own grouped FP8 product, whose scales are a row's and a column's."""
    made = deep_gemm.Experts(product)
    made.x_scales[:] = made.x_scales[:, :1]
    made.weight_scales[:] = made.weight_scales[:, :, :1]
    columns = made.weight_scales[:, :, 0].repeat_interleave(deep_gemm.GROUP, 1).contiguous()
    rows, ends = made.x_scales[:, 0].contiguous(), made.routing.offsets[1:].int()

    def call() -> Tensor:
        return torch._scaled_grouped_mm(
            made.x,
            made.weight.transpose(1, 2),
            rows,
            columns,
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return made.shape(name, call, lambda out: out)


def copy(experts: int, operator: str, name: str) -> Shape:
    """A copy kernel that moves as many bytes as a conversion from MXFP4 to FP8 must."""
    words = int(experts * 4096 * 4096 * (17 / 32 + 1) / 8)
    source = torch.randint(0, 1 << 30, (words,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return Shape(
        operator,
        name,
        [lambda: torch.bitwise_not(source, out=target)],
        8.0 * words,
        lambda out: float((out.bitwise_not() != source).float().mean()),
        0.0,
    )


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of what torch can do in a call or compile into few kernels."""
    named = flash_mla.size_of(shape)
    if operator == "sparse_mla_decode" and named is not None and named.batch:
        make = partial(decode, named.model, named.context, named.batch, shape)
        yield Peer(MODULE, "compile, gather and bmm", make, "bf16 rows")
    if (sources := residuals.Size.of_sources(operator, shape)) is not None:
        yield Peer(MODULE, "compile", partial(attention_residual, sources, shape))
    if (streams := residuals.Size.of_streams(operator, shape)) is not None:
        if operator == residuals.AFTER:
            yield Peer(MODULE, "compile", partial(post, streams, shape))
        else:
            yield Peer(MODULE, "compile", partial(pre, streams, operator, shape), "no norm behind")
    if operator in deep_gemm.PRODUCTS and (product := Product.of(shape)) is not None:
        yield Peer(MODULE, "_scaled_grouped_mm", partial(scaled_grouped, product, shape), "FP8 rows, a scale a row")
    if operator == "mxfp4_to_fp8" and (experts := re.match(r"(\d+) ", shape)) is not None:
        yield Peer(MODULE, "copy of as many bytes", partial(copy, int(experts[1]), operator, shape))
