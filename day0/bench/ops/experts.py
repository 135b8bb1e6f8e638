"""FP8 expert products and what surrounds them at model sizes, checked against float32; it times nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for
from day0_kernels.expert_routing import reference as routing_reference
from day0_kernels.expert_routing import triton as routing
from day0_kernels.fp8_expert_gemm import triton as widened
from day0_kernels.fp8_expert_product import triton as narrow
from day0_kernels.swiglu import reference as gate_reference
from day0_kernels.swiglu import triton as gate

EXPERTS, HIDDEN, WIDTH, TOP, BLOCK = 288, 4096, 2048, 8, 128
SIZES = {"up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
GATE: dict[str, Any] = {
    "score": "sigmoid",
    "top_k": TOP,
    "groups": 1,
    "topk_groups": 1,
    "normalise": True,
    "scaling": 2.5,
}
SWIGLU = {"limit": 10.0, "alpha": 1.0, "up_offset": 0.0}
# Relative to float32. Rounding an output to bfloat16 alone has 1.66e-3.
LIMIT = 2.5e-3
# The tensor cores keep some 14 bits of a sum of 128 e4m3 products.
PRODUCT_LIMIT = 4e-3


def _relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite where got is not finite."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm()) if bool(got.isfinite().all()) else math.inf


def _owners(tokens: int) -> tuple[Tensor, Tensor]:
    """Expert of each row, ascending, and the offsets int32 `[E + 1]`; each token has eight experts at random."""
    owners = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP, 1).indices.flatten().sort().values
    counts = torch.bincount(owners, minlength=EXPERTS)
    return owners, torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


def _weights(outputs: int, depth: int) -> tuple[Tensor, Tensor]:
    """e4m3fn bits of normal values, made expert by expert, and block scales."""
    weight = torch.empty(EXPERTS, outputs, depth, dtype=torch.uint8, device="cuda")
    for expert in weight:
        expert.copy_(torch.randn(outputs, depth, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8))
    return weight, 0.01 + 0.02 * torch.rand(EXPERTS, outputs // BLOCK, depth // BLOCK, device="cuda")


def product_shape(gemm: str, tokens: int, quantised: bool) -> Shape:
    """Rows in e4m3 with a scale for 128 columns, or in bfloat16, times FP8 weights."""
    outputs, depth = SIZES[gemm]
    weight, block_scales = _weights(outputs, depth)
    owners, offsets = _owners(tokens)
    rows, active = len(owners), int(owners.unique().numel())
    x = torch.randn(rows, depth, device="cuda").bfloat16()
    x_scales = x.float().view(rows, -1, BLOCK).abs().amax(-1) / 448
    codes = (x.float().view(rows, -1, BLOCK) / x_scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(rows, depth)
    some = sorted({0, int(offsets[int(offsets.diff().argmax())]), rows // 2, rows - 1})

    def error(found: Tensor) -> float:
        worst = 0.0 if bool(found.isfinite().all()) else math.inf
        for i in some:
            scales = block_scales[owners[i]].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            wide = weight[owners[i]].view(torch.float8_e4m3fn).double() * scales
            row = codes[i].double() * x_scales[i].repeat_interleave(BLOCK) if quantised else x[i].double()
            worst = max(worst, _relative(found[i], wide @ row))
        return worst

    call: Callable[[], Any] = partial(widened.fp8_expert_gemm, x, weight, block_scales, offsets)
    if quantised:
        bits = codes.view(torch.uint8)
        call = partial(narrow.fp8_expert_product, bits, x_scales, weight, block_scales, offsets)
    return Shape(
        "fp8_expert_product" if quantised else "fp8_expert_gemm",
        f"GLM {gemm}, {tokens:,} tokens",
        [call],
        active * (outputs * depth + 4 * block_scales[0].numel())
        + rows * (depth * (1 if quantised else 2) + 2 * outputs),
        error,
        PRODUCT_LIMIT if quantised else LIMIT,
        2.0 * rows * outputs * depth,
        "fp8" if quantised else "bf16",
    )


def select_shape(tokens: int) -> Shape:
    """The gate's choice of 8 of 288."""
    size_bytes = tokens * (EXPERTS * 4 + TOP * 8)
    sets = [torch.randn(tokens, EXPERTS, device="cuda") for _ in range(sets_for(size_bytes))]
    bias = torch.randn(EXPERTS, device="cuda")

    def error(found: tuple[Tensor, Tensor]) -> float:
        ids, weights = routing_reference.select_experts(sets[0], bias, **GATE)
        # Of choices that differ in the last bit alone either order is right.
        return max(float((found[0] != ids).double().mean()), _relative(found[1], weights))

    calls = [partial(routing.select_experts, logits, bias, **GATE) for logits in sets]
    return Shape("select_experts", f"{tokens:,} tokens, {TOP} of {EXPERTS}", calls, size_bytes, error, 1e-4)


def _moves(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[T, 4096]`, ids and weights `[T, 8]`."""
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP, 1).indices.int()
    return torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), ids, torch.rand(tokens, TOP, device="cuda")


def permute_shape(tokens: int) -> Shape:
    """Each token's row to its eight experts."""
    size_bytes = tokens * (HIDDEN * 2 * (1 + TOP) + TOP * 8)
    sets = [_moves(tokens) for _ in range(sets_for(size_bytes))]

    def error(found: tuple[Tensor, ...]) -> float:
        wanted = routing_reference.permute_rows(sets[0][0], sets[0][1], experts=EXPERTS)
        return max(float((got != want).double().mean()) for got, want in zip(found, wanted, strict=True))

    calls = [partial(routing.permute_rows, x, ids, experts=EXPERTS) for x, ids, _ in sets]
    return Shape("permute_rows", f"{tokens:,} tokens x {TOP} of {HIDDEN}", calls, size_bytes, error, 0.0)


def unpermute_shape(tokens: int) -> Shape:
    """The weighted sum of each token's eight rows."""
    size_bytes = tokens * (HIDDEN * 2 * (1 + TOP) + TOP * 8)
    sets = []
    for _ in range(sets_for(size_bytes)):
        x, ids, weights = _moves(tokens)
        rows, _, places = routing_reference.permute_rows(x, ids, experts=EXPERTS)
        sets.append((torch.randn_like(rows), weights, places))

    def error(found: Tensor) -> float:
        rows, weights, places = sets[0]
        return _relative(found, routing_reference.unpermute_rows(rows.float(), weights, places))

    calls = [partial(routing.unpermute_rows, *one) for one in sets]
    return Shape("unpermute_rows", f"{tokens:,} tokens x {TOP} of {HIDDEN}", calls, size_bytes, error, LIMIT)


def gate_shape(tokens: int, quantised: bool) -> Shape:
    """Between the products: `[8 T, 2 x 2048]` to `[8 T, 2048]` in bfloat16, or in e4m3 with scales."""
    rows = tokens * TOP
    size_bytes = rows * WIDTH * (4 + (1 + 4 / BLOCK if quantised else 2))
    sets = [torch.randn(rows, 2 * WIDTH, device="cuda").bfloat16() for _ in range(sets_for(size_bytes))]
    some = sorted({0, rows // 2, rows - 1})
    name = "swiglu_fp8" if quantised else "swiglu"

    def error(found: Any) -> float:
        wanted = gate_reference.swiglu(sets[0][some].float(), **SWIGLU)
        if not quantised:
            return _relative(found[some], wanted)
        values = found[0][some].view(torch.float8_e4m3fn).float().view(len(some), -1, BLOCK)
        return _relative((values * found[1][some].unsqueeze(-1)).flatten(1), wanted)

    calls = [partial(getattr(gate, name), one, **SWIGLU) for one in sets]
    # Three bits of mantissa round by 2.6 % of a value on average.
    return Shape(name, f"{tokens:,} tokens x {TOP} of {WIDTH}", calls, size_bytes, error, 0.03 if quantised else LIMIT)


def shapes() -> Iterator[Callable[[], Shape]]:
    """GLM-5.3-Flash's experts, both products, and the way there and back."""
    for gemm in SIZES:
        for tokens in (32, 128, 4096):
            yield partial(product_shape, gemm, tokens, True)
    for tokens in (32, 4096):
        yield partial(product_shape, "up", tokens, False)
    for tokens in (1, 32, 128, 4096):
        yield partial(select_shape, tokens)
        yield partial(permute_shape, tokens)
        yield partial(unpermute_shape, tokens)
        yield partial(gate_shape, tokens, False)
        yield partial(gate_shape, tokens, True)
