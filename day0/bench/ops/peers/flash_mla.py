"""FlashMLA's sparse attention over chosen latents: prefill, and decode with bfloat16 or fp8 rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.peers.peer import Peer, installed, load, normal, random_fp8, relative_error
from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import L2_BYTES, sets_for

MODULE = "flash_mla"
TOPK, VALUE, BLOCK = 2048, 512, 64
# Heads, and columns of a latent row.
MODELS = {"GLM": (64, 512), "DSV3.2": (128, 576)}
# Of an fp8 row: 512 e4m3, four float32 scales, and 64 rotary columns in bfloat16 where there are any.
FP8_ROW_BYTES = {512: 528, 576: 656}
LIMIT = 0.02
PREFILL_TOKENS = 4096
PREFILLS = ("sparse_mla_prefill", "fp8_sparse_mla_prefill")
DECODES = ("sparse_mla_decode", "fp8_sparse_mla_decode")


def attention(q: Tensor, latents: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Float32 definition: q `[n, H, R]`, latents `[S, R]`, ids `[n, k]` -> `[n, H, 512]`."""
    rows = latents[ids.long()].float()
    weights = torch.softmax(torch.einsum("nhd,nkd->nhk", q.float(), rows) * scale, -1)
    return torch.einsum("nhk,nkd->nhd", weights, rows[..., :VALUE])


def flops_of(queries: int, heads: int, width: int) -> float:
    """Scores and weighted sum over the chosen rows."""
    return 2.0 * queries * heads * TOPK * (width + VALUE)


def io_bytes(queries: int, heads: int, width: int) -> int:
    """Queries, outputs and ids."""
    return queries * (heads * (width + VALUE) * 2 + TOPK * 4)


def prefill(model: str, context: int, tokens: int, name: str) -> Shape:
    """`tokens` queries over random rows of `context`."""
    heads, width = MODELS[model]
    scale = width**-0.5
    q, latents = normal(tokens, heads, width), normal(context, 1, width)
    ids = torch.randint(0, context, (tokens, 1, TOPK), dtype=torch.int32, device="cuda")
    some = [0, 1, tokens // 2, tokens - 1]
    wanted = attention(q[some], latents[:, 0], ids[some, 0], scale)
    forward = load(MODULE).flash_mla_sparse_fwd
    return Shape(
        "sparse_mla_prefill",
        name,
        [lambda: forward(q, latents, ids, scale, VALUE, use_legacy=True)[0]],
        io_bytes(tokens, heads, width) + context * width * 2,
        lambda out: relative_error(out[some], wanted),
        LIMIT,
        flops_of(tokens, heads, width),
    )


class Decode:
    """A cache of bfloat16 and of fp8 rows of equal values, and queries of one token a sequence."""

    def __init__(self, model: str, context: int, batch: int, *, fp8: bool) -> None:
        self.batch, self.context, self.fp8 = batch, context, fp8
        self.heads, self.width = MODELS[model]
        self.scale = self.width**-0.5
        row_bytes = FP8_ROW_BYTES[self.width]
        read = batch * TOPK * (row_bytes if fp8 else self.width * 2)
        self.size_bytes = read + io_bytes(batch, self.heads, self.width)
        self.sequences = max(batch, -(-int(3 * L2_BYTES) // (context * row_bytes)))
        # Sequences beyond this many share rows: reads stay scattered and memory bounded.
        self.sequences = min(self.sequences, max(1, (1 << 23) // context))
        self.rows = torch.empty(self.sequences * context, self.width, dtype=torch.bfloat16, device="cuda")
        self.packed = torch.empty(len(self.rows) if fp8 else 0, row_bytes, dtype=torch.uint8, device="cuda")
        for start in range(0, len(self.rows), 1 << 20):
            self._fill(slice(start, min(start + (1 << 20), len(self.rows))))
        self.sets = [self._queries(i) for i in range(sets_for(self.size_bytes))]

    def _fill(self, part: slice) -> None:
        count = part.stop - part.start
        codes = random_fp8(count, VALUE)
        scales = torch.exp2(torch.randint(-2, 2, (count, 4), device="cuda").float())
        self.rows[part, :VALUE] = (codes.float().view(count, 4, 128) * scales[..., None]).view(count, VALUE).bfloat16()
        if self.width > VALUE:
            self.rows[part, VALUE:] = normal(count, self.width - VALUE)
        if self.fp8:
            self.packed[part, :VALUE] = codes.view(torch.uint8)
            self.packed[part, VALUE : VALUE + 16] = scales.view(torch.uint8)
            if self.width > VALUE:
                self.packed[part, VALUE + 16 :] = self.rows[part, VALUE:].contiguous().view(torch.uint8)

    def _queries(self, turn: int) -> tuple[Tensor, Tensor]:
        sequence = (torch.arange(self.batch, device="cuda") + turn * self.batch) % self.sequences
        ids = torch.randint(0, self.context, (self.batch, 1, TOPK), device="cuda")
        return normal(self.batch, 1, self.heads, self.width), (sequence[:, None, None] * self.context + ids).int()

    def error(self, out: Tensor) -> float:
        some = sorted({0, self.batch - 1})
        q, ids = self.sets[0]
        wanted = attention(q[some, 0], self.rows, ids[some, 0], self.scale)
        return relative_error(out.reshape(self.batch, self.heads, VALUE)[some], wanted)

    def shape(self, name: str, call: object) -> Shape:
        assert callable(call)
        return Shape(
            "sparse_mla_decode",
            name,
            [partial(call, q, ids) for q, ids in self.sets],
            self.size_bytes,
            self.error,
            LIMIT,
            flops_of(self.batch, self.heads, self.width),
        )


def decode_bf16(model: str, context: int, batch: int, name: str) -> Shape:
    """The prefill kernel with one query a sequence, on bfloat16 rows."""
    made, forward = Decode(model, context, batch, fp8=False), load(MODULE).flash_mla_sparse_fwd
    return made.shape(
        name, lambda q, ids: forward(q[:, 0], made.rows[:, None], ids, made.scale, VALUE, use_legacy=True)[0]
    )


def decode_fp8(model: str, context: int, batch: int, name: str) -> Shape:
    """The decode kernel on fp8 rows, with schedules made before."""
    flash_mla = load(MODULE)
    made = Decode(model, context, batch, fp8=True)
    layout = None if made.width > VALUE else "V32_NO_ROPE"
    blocks = made.packed.view(-1, BLOCK, 1, made.packed.shape[1])
    plans = {id(q): flash_mla.get_mla_metadata()[0] for q, _ in made.sets}

    def call(q: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = flash_mla.flash_mla_with_kvcache(
            q,
            blocks,
            None,
            None,
            VALUE,
            plans[id(q)],
            softmax_scale=made.scale,
            is_fp8_kvcache=True,
            indices=ids,
            use_legacy=True,
            kv_format=layout,
        )[0]
        return out

    return made.shape(name, call)


@dataclass(frozen=True, slots=True)
class Size:
    """Model, tokens of context, and sequences (0 for a prefill of 4,096 tokens)."""

    model: str
    context: int
    batch: int


def size_of(name: str) -> Size | None:
    """Read from a name such as `GLM 64k, batch 32` or `DSV3.2 4k x 64k`."""
    model, batch = re.match(r"GLM|DSV3\.2", name), re.search(r"batch (\d+)", name)
    contexts = re.findall(r"(\d+)k\b", name)
    if model is None or not contexts:
        return None
    return Size(model[0], int(contexts[-1]) * 1024, int(batch[1]) if batch else 0)


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of sparse attention at shapes of the models known here."""
    size = size_of(shape)
    if not installed(MODULE) or size is None:
        return
    if operator in PREFILLS and not size.batch:
        make = partial(prefill, size.model, size.context, PREFILL_TOKENS, shape)
        yield Peer(MODULE, "flash_mla_sparse_fwd", make, "bf16 rows")
    if operator in DECODES and size.batch:
        arguments = (size.model, size.context, size.batch, shape)
        if operator == "fp8_sparse_mla_decode":
            note = f"{FP8_ROW_BYTES[MODELS[size.model][1]]} bytes a row"
            yield Peer(MODULE, "flash_mla_with_kvcache", partial(decode_fp8, *arguments), note)
        else:
            yield Peer(MODULE, "flash_mla_sparse_fwd", partial(decode_bf16, *arguments), "bf16 rows")
