"""Shapes of prefill index selection: 4,096 queries at the end of a context, FP8 or bfloat16 keys, pools of 1 or 16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0_kernels.fp8_index_select.triton import fp8_index_select_prefill
from day0_kernels.index_select.triton import index_select_prefill

TOKENS, BLOCK, TOPK, KEY_DIM = 4096, 64, 2048, 128
# Share of positions that may differ: scores closer than the rounding of a tensor core's e4m3 sums, or of bfloat16's.
MOST_OTHER_POSITIONS = 5e-3
E4M3 = torch.float8_e4m3fn


def _wanted(q: Tensor, weights: Tensor, keys: Tensor, pools: int, chosen: int) -> set[int]:
    """The best pools of one query by float32: `q [HI, D]`, `weights [HI]`, `keys [pools at least, D]`."""
    scores = ((keys[:pools].float() @ q.float().T).relu() * weights.float()).sum(1)
    return set(scores.topk(chosen).indices.tolist())


def selection(heads: int, context: int, pool: int, fp8: bool) -> Shape:
    """One sequence of `context` tokens whose last 4,096 are in the call."""
    device, per_block, blocks = "cuda", BLOCK // pool, context // BLOCK
    table = torch.randperm(blocks, device=device)
    q, keys = (torch.randn(*shape, KEY_DIM, device=device) for shape in ((TOKENS, heads), (blocks, per_block)))
    weights = torch.rand(TOKENS, heads, device=device)
    scales = torch.rand(blocks, per_block, 1, device=device) + 0.5
    call: dict[str, Any] = {
        "block_table": table.int()[None],
        "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32, device=device),
        "start_positions": torch.tensor([context - TOKENS], dtype=torch.int32, device=device),
        "pool_size": pool,
        "topk_tokens": TOPK,
        "block_size": BLOCK,
        "always_tail": pool > 1,
    }
    if fp8:
        q, bits = q.to(E4M3), keys.to(E4M3)
        keys = bits.float() * scales
        call |= {"q": q.view(torch.uint8), "weights": weights}
        parts = [bits.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)]
        call["key_cache"] = torch.cat(parts, 1)
    else:
        q, weights, keys = q.bfloat16(), weights.bfloat16(), (keys * scales).bfloat16()
        call |= {"q": q, "weights": weights, "pool_cache": keys.view(-1, KEY_DIM), "softmax_scale": KEY_DIM**-0.5}
    ordered = keys[table].view(-1, KEY_DIM)

    def error(out: Tensor) -> float:
        differ = 0
        rows = (0, 1, TOKENS // 2 + 7, TOKENS - 1)
        for row in rows:
            pools = (context - TOKENS + row + 1) // pool
            wanted = _wanted(q[row], weights[row], ordered, pools, TOPK // pool)
            got = out[row, :TOPK].tolist()
            if got != sorted(set(got)) or got[0] < 0:
                return float("inf")
            differ += len({position // pool for position in got} ^ wanted)
        return differ / (2 * TOPK // pool * len(rows))

    pairs = sum((context - TOKENS + row + 1) // pool for row in range(TOKENS))
    key_bytes = KEY_DIM + 4 if fp8 else 2 * KEY_DIM
    query_bytes = heads * (KEY_DIM + 4 if fp8 else 2 * KEY_DIM + 2)
    return Shape(
        "fp8_index_select_prefill" if fp8 else "index_select_prefill",
        f"{heads} heads, 4k x {context // 1024}k" + (f", pools of {pool}" if pool > 1 else ""),
        [partial(fp8_index_select_prefill if fp8 else index_select_prefill, **call)],
        context // pool * key_bytes + TOKENS * (query_bytes + 4 * (TOPK + pool - 1)),
        error,
        MOST_OTHER_POSITIONS,
        2.0 * heads * KEY_DIM * pairs,
        "fp8" if fp8 else "bf16",
    )


def shapes() -> Iterator[Callable[[], Shape]]:
    """GLM-5.3-Flash and DeepSeek-V3.2 in its 32-head form, then 64 heads, then bfloat16 keys."""
    for context in (8192, 65536, 131072):
        yield partial(selection, 32, context, 1, True)
    yield partial(selection, 32, 131072, 16, True)
    yield partial(selection, 64, 65536, 1, True)
    yield partial(selection, 32, 131072, 16, False)
    yield partial(selection, 32, 65536, 1, False)
