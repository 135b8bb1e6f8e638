"""Sizes of sparse latent attention over bfloat16 rows, decode and prefill, of GLM-5.3-Flash and DeepSeek-V3.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.latent_attention import Rows, attention
from day0.bench.ops.shape import Shape
from day0_kernels.sparse_mla import reference
from day0_kernels.sparse_mla.triton import sparse_mla_decode, sparse_mla_prefill

# Heads, and columns of a latent; a part of the heads is what one of several devices has.
MODELS = {
    "GLM": (64, 512),
    "DSV3.2": (128, 576),
    "16 heads of DSV3.2": (16, 576),
    "32 heads of DSV3.2": (32, 576),
}
SCALE = 192**-0.5


def _cache(slots: int, width: int) -> Tensor:
    return torch.randn(slots, width, device="cuda", dtype=torch.bfloat16)


ROWS = Rows(
    "sparse_mla", "latents", sparse_mla_decode, sparse_mla_prefill, reference.sparse_mla_decode, _cache, 1 << 21
)


def shapes() -> Iterator[Callable[[], Shape]]:
    """Decode at 64k, all heads and those of one of several devices; then prefill of 4,096 tokens."""

    def of(model: str, context: int, rows: int, packed: bool) -> Callable[[], Shape]:
        return partial(attention, ROWS, model, *MODELS[model], SCALE, context, rows, packed)

    for rows in (1, 32, 128):
        yield of("GLM", 65536, rows, False)
    for model in ("DSV3.2", "16 heads of DSV3.2", "32 heads of DSV3.2"):
        yield of(model, 65536, 128, False)
    for model in ("GLM", "DSV3.2"):
        yield of(model, 65536, 4096, True)
    yield of("GLM", 8192, 4096, True)
