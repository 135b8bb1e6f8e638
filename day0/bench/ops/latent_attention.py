"""A shape of sparse latent attention over a cache of any kind of rows; the families say which rows and which sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for

BLOCK, TOPK, VALUE_DIM = 64, 2048, 512
# Relative error of a bfloat16 result whose weights, and latents where they come in fp8, are rounded to bfloat16 too.
MOST_ERROR = 4e-3


@dataclass(frozen=True, slots=True)
class Rows:
    """A kind of cached rows: its operators, and how a cache of `(slots, columns)` is made.

    `argument` names the cache in a call. `reference` is the definition of `decode` in float32. Sequences beyond
    `most_slots` share blocks: reads stay scattered and memory bounded.
    """

    name: str
    argument: str
    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    cache: Callable[[int, int], Tensor]
    most_slots: int


def attention(
    kind: Rows, model: str, heads: int, width: int, scale: float, context: int, rows: int, packed: bool
) -> Shape:
    """`rows` sequences of `context` tokens, or as many tokens of one (`packed`); `width` columns in a latent."""
    sequences = 1 if packed else rows
    blocks = min(sequences * context, kind.most_slots) // BLOCK
    shuffled = [torch.randperm(blocks, device="cuda") for _ in range(-(-sequences * context // BLOCK // blocks))]
    table = torch.cat(shuffled)[: sequences * context // BLOCK].view(sequences, -1).int()
    cache = kind.cache(blocks * BLOCK, width)
    read = min(rows * TOPK, context) if packed else rows * TOPK
    moved = read * cache[0].nbytes + rows * (heads * (width + VALUE_DIM) * 2 + TOPK * 4)
    scalars: dict[str, Any] = {"block_size": BLOCK, "softmax_scale": scale, "value_dim": VALUE_DIM}
    shared: dict[str, Any] = {kind.argument: cache, "block_table": table, **scalars}
    if packed:
        shared["cu_seqlens"] = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    calls = [
        partial(
            kind.prefill if packed else kind.decode,
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
        wanted = kind.reference(
            first["q"][some].float(), cache, first["topk_indices"][some], table[owners], **scalars
        ).double()
        off = float((out[some].double() - wanted).norm() / wanted.norm())
        return off if bool(out.isfinite().all()) else float("inf")

    return Shape(
        f"{kind.name}_{'prefill' if packed else 'decode'}",
        f"{model} {rows // 1024}k x {context // 1024}k" if packed else f"{model} {context // 1024}k, batch {rows}",
        calls,
        moved,
        error,
        MOST_ERROR,
        2.0 * rows * heads * TOPK * (width + VALUE_DIM),
    )
