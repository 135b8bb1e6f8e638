"""Index selection on an NVIDIA GPU; device code is in `_triton_kernels`, block sizes in `sm_*.json`.

It does not know how pooled keys were made. Products take operands of the dtype of the call and sum in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.index_select._choice import Choice, power_of_two
from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

LARGEST_HEADS = 64
LARGEST_WIDTH = 256
LARGEST_POOL = 64
# TILES may differ by size, the others may not: a pool must have the same bits in every batch.
_PLAIN_SCORE = {"BLOCK_P": 64, "TILES": 4, "STAGES": 2, "num_warps": 4, "OVERLAP": 0}
# Products of float32 run outside the tensor cores.
_EXACT_SCORE = {"BLOCK_P": 64, "TILES": 4, "STAGES": 1, "num_warps": 4, "OVERLAP": 0}


def _limit(heads: int, width: int, pool_size: int) -> str | None:
    for name, value, largest in (
        ("HI", heads, LARGEST_HEADS),
        ("D", width, LARGEST_WIDTH),
        ("P", pool_size, LARGEST_POOL),
    ):
        if value > largest:
            return f"{name} must be at most {largest}, is {value}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    return _limit(*(sizes.get(name, 1) for name in ("HI", "D", "P"))) or device_refusal(device)


def _check(q: Tensor, pool_cache: Tensor, pool_size: int) -> None:
    """ValueError where a size is beyond the kernels, a dtype differs or the cache has gaps."""
    _, heads, width = q.shape
    beyond = _limit(heads, width, pool_size)
    if beyond is not None:
        raise ValueError(beyond)
    if pool_cache.dtype != q.dtype or pool_cache.shape[1] != width or not pool_cache.is_contiguous():
        raise ValueError(
            f"pool_cache must be contiguous {q.dtype} [pools, {width}], is {pool_cache.dtype} "
            f"{tuple(pool_cache.shape)} with strides {pool_cache.stride()}"
        )


def index_select_decode(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    softmax_scale: float,
    always_tail: bool,
) -> Tensor:
    """As the reference, in two or three launches that read no length back to the host.

    Scores lie in a scratch of at most 9 bytes a pool that the block table can name. ValueError where a size is beyond
    the kernels, a dtype differs or the cache has gaps.
    """
    from day0_kernels.index_select._triton_kernels import score_pools

    rows, heads, width = q.shape
    _check(q, pool_cache, pool_size)
    columns = topk_tokens + (pool_size - 1 if always_tail else 0)
    out = torch.empty(rows, columns, dtype=torch.int32, device=q.device)
    if not rows or not columns:
        return out
    pools_a_block = block_size // pool_size
    choice = Choice(rows, block_table.shape[1] * pools_a_block, topk_tokens // pool_size, q.device)
    if choice.refusal is not None:
        raise ValueError(choice.refusal)
    if choice.pools > choice.chosen > 0:
        chosen: Mapping[str, int] = _EXACT_SCORE
        if q.dtype != torch.float32:
            chosen = configuration(__file__, q.device, "score_pools", rows, _PLAIN_SCORE)
        score_pools[(rows, -(-choice.pools // (chosen["TILES"] * chosen["BLOCK_P"])))](
            q.contiguous(),
            weights.contiguous(),
            pool_cache,
            block_table,
            seq_lens,
            choice.orders,
            choice.groups,
            block_table.stride(0),
            choice.orders.stride(0),
            choice.groups.stride(0),
            choice.chosen,
            softmax_scale,
            HI=heads,
            D=width,
            P=pool_size,
            POOLS_A_BLOCK=pools_a_block,
            BLOCK_HI=power_of_two(heads),
            BLOCK_D=power_of_two(width),
            LARGEST=choice.largest_group,
            **chosen,
        )
    choice.launch(seq_lens, out, pool_size, always_tail)
    return out


def index_select_prefill(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    softmax_scale: float,
    always_tail: bool,
) -> Tensor:
    """As the reference; scores of some tokens at a time lie in a scratch of bounded size, see `_prefill`.

    ValueError where a size is beyond the kernels, a dtype differs or the cache has gaps.
    """
    from day0_kernels.index_select._prefill import configurations, select_prefill

    _check(q, pool_cache, pool_size)
    score, choose = configurations(__file__, q, pool_size, topk_tokens // pool_size)
    return select_prefill(
        q,
        weights,
        pool_cache,
        None,
        block_table,
        cu_seqlens,
        start_positions,
        pool_size=pool_size,
        topk_tokens=topk_tokens,
        block_size=block_size,
        softmax_scale=softmax_scale,
        always_tail=always_tail,
        score=score,
        choose=choose,
    )
