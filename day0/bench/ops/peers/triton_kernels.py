"""triton_kernels' ragged product of bfloat16 rows and MXFP4 weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from day0.bench.ops.peers.humming import LIMIT, PACKED_BYTES
from day0.bench.ops.peers.peer import Peer, installed, load, normal
from day0.bench.ops.peers.routing import Product, Routing, packed_weights
from day0.bench.ops.shape import Shape
from day0_kernels.mxfp4 import decode

MODULE = "triton_kernels"
GROUP = 32
# The package asks for these names of a later Triton than 3.6: one target test, and a kernel's place in its file.
LATER_TARGET = "is_hip_gfx1250"
LATER_PLACES = ("def_file_line_number", "def_file_col_number")


def allow_triton_3_6() -> None:
    """Gives Triton the few names that the package looks for and does not need on Hopper."""
    info, jit = load("triton.language.target_info"), load("triton.runtime.jit").JITFunction
    if not hasattr(info, LATER_TARGET):
        setattr(info, LATER_TARGET, lambda: False)
    for name in LATER_PLACES:
        if not hasattr(jit, name):
            setattr(jit, name, 1)


def product(size: Product, operator: str, name: str) -> Shape:
    """Weights and scales are laid out as the package wants them before."""
    allow_triton_3_6()
    matmul, tensor = load("triton_kernels.matmul"), load("triton_kernels.tensor")
    layout = load("triton_kernels.tensor_details.layout")
    routing, (codes, scales) = Routing(size.tokens), packed_weights(size)
    weight = tensor.convert_layout(
        tensor.wrap_torch_tensor(codes.transpose(1, 2), dtype=tensor.FP4),
        layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2),
    )
    weight_scales = tensor.convert_layout(
        tensor.wrap_torch_tensor(scales.transpose(1, 2)),
        layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=8),
    )
    config = matmul.PrecisionConfig(b_mx_scale=weight_scales, b_microblock_size=GROUP, out_dtype=torch.bfloat16)
    ragged = tensor.make_ragged_tensor_metadata(routing.counts.int(), routing.rows)
    x = normal(routing.rows, size.depth)
    return Shape(
        operator,
        name,
        [lambda: matmul.matmul(x, weight, None, a_ragged_metadata=ragged, precision_config=config)],
        routing.size_bytes(size, PACKED_BYTES),
        routing.error(lambda i: x[i].float(), lambda e: decode(codes[e], scales[e])),
        LIMIT,
        routing.flops(size),
    )


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of products on MXFP4 weights, from a few rows on."""
    size = Product.of(shape)
    if installed(MODULE) and size is not None and "mxfp4" in operator and size.tokens > 1:
        yield Peer(MODULE, "W4A16", partial(product, size, operator, shape), "bf16 rows")
