"""Humming's grouped products on MXFP4 weights, with rows in bfloat16 or quantised by itself to e4m3."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from day0.bench.ops.peers.peer import Peer, installed, load, normal
from day0.bench.ops.peers.routing import EXPERTS, Product, Routing, packed_weights
from day0.bench.ops.shape import Shape
from day0_kernels.mxfp4 import decode

MODULE = "humming"
PACKED_BYTES = 17 / 32
# Rows in e4m3 with a scale a row lose this much by themselves.
LIMIT, LIMIT_FP8_ROWS = 0.03, 0.06


def product(size: Product, fp8_rows: bool, operator: str, name: str) -> Shape:
    """Weights are laid out anew before."""
    routing, (codes, scales) = Routing(size.tokens), packed_weights(size)
    inputs: dict[str, Any] = {"dtype": "float8e4m3"} if fp8_rows else {}
    with torch.device("cuda"):
        layer = load("humming.layer").HummingLayer(
            shape_n=size.outputs,
            shape_k=size.depth,
            weight_config={"quant_method": "mxfp4"},
            input_config=inputs,
            num_experts=EXPERTS,
            torch_dtype=torch.bfloat16,
        )
    layer.load_from_tensors({"weight": codes, "weight_scale": scales})
    layer.transform()
    x, offsets = normal(routing.rows, size.depth), routing.offsets.long()
    return Shape(
        operator,
        name,
        [lambda: layer(x, expert_layout=offsets, compute_config={"gemm_type": "grouped_contiguous"})],
        routing.size_bytes(size, PACKED_BYTES),
        routing.error(lambda i: x[i].float(), lambda e: decode(codes[e], scales[e])),
        LIMIT_FP8_ROWS if fp8_rows else LIMIT,
        routing.flops(size),
        "fp8" if fp8_rows else "bf16",
    )


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of products on MXFP4 weights, with rows in the dtype of ours."""
    size = Product.of(shape)
    if not installed(MODULE) or size is None:
        return
    if operator == "mxfp4_fp8_expert_gemm":
        yield Peer(MODULE, "W4A8", partial(product, size, True, operator, shape), "rows to e4m3 inside")
    if operator == "mxfp4_expert_gemm":
        yield Peer(MODULE, "W4A16", partial(product, size, False, operator, shape), "bf16 rows")
