"""Shapes of sparse latent attention over FP8 rows, decode and prefill, of GLM-5.3-Flash and DeepSeek-V3.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for
from day0_kernels.fp8_sparse_mla import reference
from day0_kernels.fp8_sparse_mla.triton import fp8_sparse_mla_decode, fp8_sparse_mla_prefill, row_bytes

BLOCK, TOPK, VALUE_DIM, GROUP = 64, 2048, 512, 128
# Heads, and columns of a latent.
MODELS = {"GLM": (64, 512), "DSV3.2": (128, 576), "16 heads of DSV3.2": (16, 576)}
# Sequences beyond so many slots share blocks: reads stay scattered and memory bounded.
MOST_SLOTS = 1 << 22
# Relative error of a bfloat16 result whose latents and weights are rounded to bfloat16 too.
MOST_ERROR = 4e-3


def _cache(slots: int, width: int) -> Tensor:
    """Normal latents as FP8 rows, each group of 128 with the scale that its largest needs."""
    cache = torch.empty(slots, row_bytes(width, VALUE_DIM), dtype=torch.uint8, device="cuda")
    for part in cache.split(1 << 19):
        latents = torch.randn(len(part), width, device="cuda")
        groups = latents[:, :VALUE_DIM].unflatten(1, (-1, GROUP))
        scales = groups.abs().amax(2, keepdim=True) / 448
        codes, tail = (groups / scales).to(torch.float8_e4m3fn), latents[:, VALUE_DIM:].bfloat16()
        parts = codes.flatten(1), scales.flatten(1), tail.contiguous()
        part.copy_(torch.cat([one.view(torch.uint8) for one in parts], 1))
    return cache


def attention(model: str, context: int, rows: int, packed: bool) -> Shape:
    """`rows` sequences of `context` tokens, or as many tokens of one."""
    heads, width = MODELS[model]
    sequences = 1 if packed else rows
    blocks = min(sequences * context, MOST_SLOTS) // BLOCK
    shuffled = [torch.randperm(blocks, device="cuda") for _ in range(-(-sequences * context // BLOCK // blocks))]
    table = torch.cat(shuffled)[: sequences * context // BLOCK].view(sequences, -1).int()
    cache = _cache(blocks * BLOCK, width)
    read = min(rows * TOPK, context) if packed else rows * TOPK
    moved = read * cache.shape[1] + rows * (heads * (width + VALUE_DIM) * 2 + TOPK * 4)
    scalars: dict[str, Any] = {"block_size": BLOCK, "softmax_scale": width**-0.5, "value_dim": VALUE_DIM}
    shared: dict[str, Any] = {"cache": cache, "block_table": table, **scalars}
    if packed:
        shared["cu_seqlens"] = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    calls = [
        partial(
            fp8_sparse_mla_prefill if packed else fp8_sparse_mla_decode,
            q=torch.randn(rows, heads, width, device="cuda").bfloat16(),
            topk_indices=torch.randint(0, context, (rows, TOPK), device="cuda").sort(1).values.int(),
            **shared,
        )
        for _ in range(sets_for(moved))
    ]
    first = calls[0].keywords

    def error(out: Tensor) -> float:
        some = sorted({0, rows // 2, rows - 1})
        owners = [0] * len(some) if packed else some
        wanted = reference.fp8_sparse_mla_decode(
            first["q"][some].float(), cache, first["topk_indices"][some], table[owners], **scalars
        ).double()
        off = float((out[some].double() - wanted).norm() / wanted.norm())
        return off if bool(out.isfinite().all()) else float("inf")

    return Shape(
        f"fp8_sparse_mla_{'prefill' if packed else 'decode'}",
        f"{model} {rows // 1024}k x {context // 1024}k" if packed else f"{model} {context // 1024}k, batch {rows}",
        calls,
        moved,
        error,
        MOST_ERROR,
        2.0 * rows * heads * TOPK * (width + VALUE_DIM),
    )


def shapes() -> Iterator[Callable[[], Shape]]:
    """Decode at 64k, all heads and those of one of eight devices; then a prefill of 4,096 tokens."""
    for rows in (1, 32, 128):
        yield partial(attention, "GLM", 65536, rows, False)
    for rows in (1, 128):
        yield partial(attention, "DSV3.2", 65536, rows, False)
    yield partial(attention, "16 heads of DSV3.2", 65536, 128, False)
    for model in ("GLM", "DSV3.2"):
        yield partial(attention, model, 65536, 4096, True)
