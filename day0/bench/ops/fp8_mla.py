"""Sizes of sparse latent attention over FP8 rows, decode and prefill, of GLM-5.3-Flash and DeepSeek-V3.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.latent_attention import VALUE_DIM, Rows, attention
from day0.bench.ops.shape import Shape
from day0_kernels.fp8_sparse_mla import reference
from day0_kernels.fp8_sparse_mla.triton import fp8_sparse_mla_decode, fp8_sparse_mla_prefill, row_bytes

GROUP = 128
# Heads, and columns of a latent.
MODELS = {"GLM": (64, 512), "DSV3.2": (128, 576), "16 heads of DSV3.2": (16, 576)}


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


ROWS = Rows(
    "fp8_sparse_mla",
    "cache",
    fp8_sparse_mla_decode,
    fp8_sparse_mla_prefill,
    reference.fp8_sparse_mla_decode,
    _cache,
    1 << 22,
)


def shapes() -> Iterator[Callable[[], Shape]]:
    """Decode at 64k, all heads and those of one of eight devices; then a prefill of 4,096 tokens."""

    def of(model: str, context: int, rows: int, packed: bool) -> Callable[[], Shape]:
        heads, width = MODELS[model]
        return partial(attention, ROWS, model, heads, width, width**-0.5, context, rows, packed)

    for rows in (1, 32, 128):
        yield of("GLM", 65536, rows, False)
    for rows in (1, 128):
        yield of("DSV3.2", 65536, rows, False)
    yield of("16 heads of DSV3.2", 65536, 128, False)
    for model in ("GLM", "DSV3.2"):
        yield of(model, 65536, 4096, True)
