"""Index selection on FP8 queries and keys on an NVIDIA GPU; device code in `_triton_*`, block sizes in `sm_*.json`.

It does not know how queries and keys were quantised. Products are e4m3 by e4m3 on the tensor cores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.index_select._choice import Choice, power_of_two
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",))

LARGEST_HEADS = 64
LARGEST_WIDTH = 256
LARGEST_POOL = 64
# The least depth of an e4m3 product.
LEAST_WIDTH = 32
# TILES may differ by size, the others may not: a pool must have the same bits in every batch.
_PLAIN_SCORE = {"BLOCK_P": 128, "TILES": 4, "STAGES": 2, "num_warps": 4, "OVERLAP": 0}
_PLAIN_WHOLE = {"BLOCK_P": 64, "TILES": 8, "STAGES": 2, "num_warps": 4, "OVERLAP": 0}


def _limit(heads: int, width: int, pool_size: int) -> str | None:
    for name, value, largest in (
        ("HI", heads, LARGEST_HEADS),
        ("D", width, LARGEST_WIDTH),
        ("P", pool_size, LARGEST_POOL),
    ):
        if value > largest:
            return f"{name} must be at most {largest}, is {value}"
    if width % 4:
        return f"D must be a multiple of 4, so that scales are aligned, is {width}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    beyond = _limit(sizes.get("HI", 1), sizes.get("D", 4), sizes.get("P", 1))
    return beyond or device_refusal(device)


def _check(q: Tensor, key_cache: Tensor, pool_size: int, block_size: int) -> None:
    """ValueError where a size is beyond the kernels or the cache is not as the spec says."""
    _, heads, width = q.shape
    beyond = _limit(heads, width, pool_size)
    if beyond is not None:
        raise ValueError(beyond)
    block_bytes = block_size // pool_size * (width + 4)
    if key_cache.dtype != torch.uint8 or key_cache.shape[1:] != (block_bytes,) or not key_cache.is_contiguous():
        raise ValueError(
            f"key_cache must be contiguous torch.uint8 [num_blocks, {block_bytes}], is {key_cache.dtype} "
            f"{tuple(key_cache.shape)} with strides {key_cache.stride()}"
        )


def fp8_index_select_decode(
    q: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    always_tail: bool,
) -> Tensor:
    """As the reference, in two or three launches that read no length back to the host.

    Scores lie in a scratch of at most 9 bytes a pool that the block table can name. ValueError where a size is beyond
    the kernels or the cache is not as the spec says.
    """
    from day0_kernels.fp8_index_select._triton_kernels import score_fp8_pools, score_whole_blocks

    rows, heads, width = q.shape
    _check(q, key_cache, pool_size, block_size)
    pools_a_block = block_size // pool_size
    columns = topk_tokens + (pool_size - 1 if always_tail else 0)
    out = torch.empty(rows, columns, dtype=torch.int32, device=q.device)
    if not rows or not columns:
        return out
    choice = Choice(rows, block_table.shape[1] * pools_a_block, topk_tokens // pool_size, q.device)
    if choice.refusal is not None:
        raise ValueError(choice.refusal)
    if choice.pools > choice.chosen > 0:
        kernel = score_whole_blocks
        chosen: Mapping[str, int] = configuration(__file__, q.device, "score_whole_blocks", rows, _PLAIN_WHOLE)
        if pools_a_block % chosen["BLOCK_P"]:
            kernel = score_fp8_pools
            chosen = configuration(__file__, q.device, "score_fp8_pools", rows, _PLAIN_SCORE)
        kernel[(rows, -(-choice.pools // (chosen["TILES"] * chosen["BLOCK_P"])))](
            q.contiguous().view(torch.float8_e4m3fn),
            weights.contiguous(),
            key_cache.view(torch.float8_e4m3fn),
            key_cache.view(torch.float32),
            block_table,
            seq_lens,
            choice.orders,
            choice.groups,
            block_table.stride(0),
            choice.orders.stride(0),
            choice.groups.stride(0),
            choice.chosen,
            HI=heads,
            D=width,
            P=pool_size,
            POOLS_A_BLOCK=pools_a_block,
            BLOCK_HI=power_of_two(heads),
            BLOCK_D=power_of_two(width, LEAST_WIDTH),
            LARGEST=choice.largest_group,
            **chosen,
        )
    choice.launch(seq_lens, out, pool_size, always_tail)
    return out


def fp8_index_select_prefill(
    q: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    always_tail: bool,
) -> Tensor:
    """As the reference; scores of some tokens at a time lie in a scratch of bounded size, see `index_select._prefill`.

    ValueError where a size is beyond the kernels or the cache is not as the spec says.
    """
    from day0_kernels.index_select._prefill import configurations, select_prefill

    _check(q, key_cache, pool_size, block_size)
    q = q.view(torch.float8_e4m3fn)
    score, choose = configurations(__file__, q, pool_size, topk_tokens // pool_size)
    return select_prefill(
        q,
        weights,
        key_cache.view(torch.float8_e4m3fn),
        key_cache.view(torch.float32),
        block_table,
        cu_seqlens,
        start_positions,
        pool_size=pool_size,
        topk_tokens=topk_tokens,
        block_size=block_size,
        softmax_scale=1.0,
        always_tail=always_tail,
        score=score,
        choose=choose,
    )
