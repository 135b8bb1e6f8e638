"""Shapes of index selection at decode: scores and the choice in one, FP8 and bfloat16 keys, pools of 1 and 16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for
from day0_kernels.fp8_index_select.triton import fp8_index_select_decode
from day0_kernels.index_select.triton import index_select_decode

BLOCK, TOPK, KEY_DIM = 64, 2048, 128
# Share of positions that may differ: scores closer than the rounding of a tensor core's e4m3 sums, or of bfloat16's.
MOST_OTHER_POSITIONS = 5e-3
E4M3 = torch.float8_e4m3fn


def _cache(blocks: int, per_block: int, fp8: bool) -> tuple[Tensor, Tensor]:
    """What the operator reads, and the same keys with their scales: `[blocks, per_block, D]` of e4m3 or bfloat16."""
    keys = torch.randn(blocks, per_block, KEY_DIM, device="cuda", dtype=torch.bfloat16)
    if not fp8:
        return keys.view(-1, KEY_DIM), torch.ones(blocks, per_block, device="cuda")
    scales = torch.rand(blocks, per_block, device="cuda") + 0.5
    parts = [keys.to(E4M3).view(torch.uint8).flatten(1), scales.view(torch.uint8)]
    return torch.cat(parts, 1), scales


def selection(heads: int, rows: int, context: int, pool: int, fp8: bool) -> Shape:
    """`rows` sequences of `context` tokens, each less than the one before by a token."""
    device, per_block = "cuda", BLOCK // pool
    key_bytes, query_bytes = (KEY_DIM + 4, KEY_DIM + 4) if fp8 else (2 * KEY_DIM, 2 * KEY_DIM + 2)
    columns = TOPK + (pool - 1 if pool > 1 else 0)
    moved = rows * (context // pool * key_bytes + heads * query_bytes + columns * 4)
    of_a_set = rows * context // BLOCK
    sets = sets_for(moved)
    cache, scales = _cache(of_a_set * sets, per_block, fp8)
    tables = torch.randperm(of_a_set * sets, device=device).int().view(sets, rows, context // BLOCK)
    lengths = (context - torch.arange(rows, device=device)).int()
    scalars: dict[str, Any] = {"pool_size": pool, "topk_tokens": TOPK, "block_size": BLOCK, "always_tail": pool > 1}
    calls = []
    for table in tables:
        q, weights = torch.randn(rows, heads, KEY_DIM, device=device), torch.rand(rows, heads, device=device)
        shared = {"block_table": table, "seq_lens": lengths, **scalars}
        if fp8:
            bits = q.to(E4M3).view(torch.uint8)
            calls.append(partial(fp8_index_select_decode, q=bits, weights=weights, key_cache=cache, **shared))
        else:
            shared |= {"q": q.bfloat16(), "weights": weights.bfloat16(), "softmax_scale": KEY_DIM**-0.5}
            calls.append(partial(index_select_decode, pool_cache=cache, **shared))
    first = calls[0].keywords

    def error(out: Tensor) -> float:
        differ = 0
        some = sorted({0, rows // 2, rows - 1})
        for row in some:
            pools = int(lengths[row]) // pool
            blocks = first["block_table"][row].long()
            if fp8:
                q = first["q"][row].view(E4M3).float()
                keys = cache[blocks, : per_block * KEY_DIM].view(E4M3).float().view(-1, KEY_DIM)
            else:
                q, keys = first["q"][row].float(), cache.view(-1, per_block, KEY_DIM)[blocks].float().view(-1, KEY_DIM)
            scores = (keys @ q.T).relu() @ first["weights"][row].float() * scales[blocks].view(-1)
            wanted = set(scores[:pools].topk(TOPK // pool).indices.tolist())
            got = out[row, :TOPK].tolist()
            if got != sorted(set(got)) or got[0] < 0:
                return float("inf")
            differ += len({position // pool for position in got} ^ wanted)
        return differ / (2 * TOPK // pool * len(some))

    return Shape(
        "fp8_index_select_decode" if fp8 else "index_select_decode",
        f"{heads} heads, {context // 1024}k, batch {rows}" + (f", pools of {pool}" if pool > 1 else ""),
        calls,
        moved,
        error,
        MOST_OTHER_POSITIONS,
    )


def shapes() -> Iterator[Callable[[], Shape]]:
    """DeepSeek-V3.2's keys with 32 heads, then GLM-5.3-Flash's pools, 64 heads, a short context, bfloat16 keys."""
    for rows in (1, 32, 128):
        yield partial(selection, 32, rows, 131072, 1, True)
    for rows in (1, 32, 128):
        yield partial(selection, 32, rows, 131072, 16, True)
    yield partial(selection, 64, 32, 65536, 1, True)
    yield partial(selection, 32, 128, 8192, 1, True)
    for rows in (1, 32, 128):
        yield partial(selection, 32, rows, 131072, 1, False)
    yield partial(selection, 32, 128, 131072, 16, False)
