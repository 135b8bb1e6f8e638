"""Expert products on MXFP4 weights, the quantisation of their rows, and the conversion to FP8; it times nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.peers.peer import normal, relative_error
from day0.bench.ops.peers.routing import EXPERTS, Product, Routing, packed_weights
from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for
from day0_kernels.fp8_quantise import reference as quantise_reference
from day0_kernels.fp8_quantise.triton import fp8_quantise
from day0_kernels.mxfp4 import decode
from day0_kernels.mxfp4_expert_gemm.triton import mxfp4_expert_gemm
from day0_kernels.mxfp4_fp8_expert_gemm.triton import mxfp4_fp8_expert_gemm
from day0_kernels.mxfp4_to_fp8.triton import mxfp4_to_fp8

PACKED_BYTES = 17 / 32
# Relative, against float32 of the rows as they were: bfloat16 results; rows rounded to e4m3 lose 2.6e-2 by themselves.
LIMIT, LIMIT_FP8_ROWS = 4e-3, 3e-2
# Tokens of a batch whose products scale each group by itself.
MOST_BY_GROUP = 128


def exact_shape(size: Product, name: str) -> Shape:
    """Rows in bfloat16, results as good as bfloat16's."""
    codes, scales = packed_weights(size)
    routing = Routing(size.tokens)
    x = normal(routing.rows, size.depth)
    return Shape(
        "mxfp4_expert_gemm",
        name,
        [partial(mxfp4_expert_gemm, x, codes, scales, routing.offsets.int())],
        routing.size_bytes(size, PACKED_BYTES),
        routing.error(lambda i: x[i].float(), lambda e: decode(codes[e], scales[e])),
        LIMIT,
        routing.flops(size),
        "fp8",
    )


def fp8_rows_shape(size: Product, name: str) -> Shape:
    """Rows in bfloat16 that are quantised to e4m3 within the time."""
    codes, scales = packed_weights(size)
    # As `mxfp4.row_tops`, for codes that are zero in no whole group.
    tops = scales.amax(-1)
    routing = Routing(size.tokens)
    x, offsets = normal(routing.rows, size.depth), routing.offsets.int()

    def call() -> Tensor:
        q, x_scales = fp8_quantise(x, group=size.depth, mxfp4_order=True)
        return mxfp4_fp8_expert_gemm(q, x_scales, codes, scales, tops, offsets, by_group=size.tokens <= MOST_BY_GROUP)

    return Shape(
        "mxfp4_fp8_expert_gemm",
        name,
        [call],
        routing.size_bytes(size, PACKED_BYTES),
        routing.error(lambda i: x[i].float(), lambda e: decode(codes[e], scales[e])),
        LIMIT_FP8_ROWS,
        routing.flops(size),
        "fp8",
    )


def quantise_shape(rows: int, columns: int, group: int, ordered: bool) -> Shape:
    """Rows in bfloat16 to e4m3."""
    moved = rows * columns * 3 + rows * columns // group * 4
    sets = [normal(rows, columns) for _ in range(sets_for(moved))]

    def error(found: tuple[Tensor, Tensor]) -> float:
        wanted = quantise_reference.fp8_quantise(sets[0], group=group, mxfp4_order=ordered)
        return max(float((got != want).double().mean()) for got, want in zip(found, wanted, strict=True))

    return Shape(
        "fp8_quantise",
        f"{rows:,} x {columns}, a scale for {group}",
        [partial(fp8_quantise, x, group=group, mxfp4_order=ordered) for x in sets],
        moved,
        error,
        0.0,
    )


def conversion_shape(experts: int) -> Shape:
    """MXFP4 weights to FP8, checked for one expert to be exact."""
    codes, scales = (part[:experts].contiguous() for part in packed_weights(Product(4096, 4096, 1)))
    fp8 = torch.empty(experts, 4096, 4096, dtype=torch.uint8, device="cuda")

    def error(found: tuple[Tensor, Tensor]) -> float:
        wide = found[0][-1].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return relative_error(fp8[-1].view(torch.float8_e4m3fn).float() * wide, decode(codes[-1], scales[-1]))

    return Shape(
        "mxfp4_to_fp8",
        f"{experts} experts of 4096 x 4096",
        [partial(mxfp4_to_fp8, codes, scales, fp8)],
        fp8.numel() * (PACKED_BYTES + 1),
        error,
        0.0,
    )


def shapes() -> Iterator[Callable[[], Shape]]:
    """A decode batch with rows of either kind, a prefill chunk with FP8 rows, and what belongs to them."""
    for tokens in (1, 32, 128):
        for way, outputs, depth in (("up", 4096, 4096), ("down", 4096, 2048)):
            size, name = Product(outputs, depth, tokens), f"GLM {way}, {tokens} tokens"
            yield partial(exact_shape, size, name)
            yield partial(fp8_rows_shape, size, name)
    for tokens in (512, 4096):
        for way, outputs, depth in (("up", 4096, 4096), ("down", 4096, 2048)):
            yield partial(fp8_rows_shape, Product(outputs, depth, tokens), f"GLM {way}, {tokens:,} tokens")
    yield partial(exact_shape, Product(4096, 4096, 512), "GLM up, 512 tokens")
    yield partial(quantise_shape, 32768, 4096, 4096, True)
    yield partial(quantise_shape, 4096, 4096, 128, False)
    for experts in (32, EXPERTS):
        yield partial(conversion_shape, experts)
