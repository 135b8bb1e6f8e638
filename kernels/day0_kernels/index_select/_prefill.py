"""Host side of index selection's prefill in Triton, for keys of any dtype; device code is in `_triton_*`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.triton_launch import configuration

# Scores of as many tokens as fit in it lie in scratch at a time, and the candidates of as many beside it.
SCRATCH_BYTES = 1 << 29
LARGEST_CHOICE = 8192
LEAST_CANDIDATES = 1024
PLAIN_SCORE = {"COLUMNS": 128, "BLOCK_P": 64, "TILES": 64, "STAGES": 3, "num_warps": 4}
# Products of float32 run outside the tensor cores.
EXACT_SCORE = {"COLUMNS": 32, "BLOCK_P": 64, "TILES": 64, "STAGES": 1, "num_warps": 4}
PLAIN_CHOICE = {"TILE": 512, "num_warps": 4}


def power_of_two(count: int, least: int) -> int:
    """The least power of two that is at least `count` and `least`."""
    return max(least, 1 << (count - 1).bit_length())


def candidates_of(chosen_pools: int) -> int:
    """The most pools that may reach a gate, where `chosen_pools` are wanted: what one program holds in registers."""
    return power_of_two(2 * chosen_pools, LEAST_CANDIDATES)


def configurations(
    module_file: str, q: Tensor, pool_size: int, chosen_pools: int
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Block sizes of scores and choice, committed beside `module_file` or plain, for `select_prefill`.

    By sizes of the model alone: a query has the same bits in every call.
    """
    score: Mapping[str, int] = EXACT_SCORE
    if q.dtype != torch.float32:
        kernel = "score_queries" if pool_size == 1 else "score_queries_of_pools"
        score = configuration(module_file, q.device, kernel, q.shape[1], PLAIN_SCORE)
    most = candidates_of(chosen_pools)
    return score, configuration(module_file, q.device, "choose_queries", most, PLAIN_CHOICE)


def select_prefill(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    *,
    pool_size: int,
    topk_tokens: int,
    block_size: int,
    softmax_scale: float,
    always_tail: bool,
    score: Mapping[str, int],
    choose: Mapping[str, int],
) -> Tensor:
    """As the reference, two launches for each `SCRATCH_BYTES` of scores; no length is read back to the host.

    `keys` is the cache in the dtype of `q`, `key_scales` the same bytes as float32 where scales follow the keys of a
    block. ValueError where the choice is beyond `LARGEST_CHOICE` pools or the scale is not positive.
    """
    from day0_kernels.index_select._triton_gate import choose_queries
    from day0_kernels.index_select._triton_prefill import score_queries

    tokens, heads, width = q.shape
    chosen_pools = topk_tokens // pool_size
    if chosen_pools > LARGEST_CHOICE:
        raise ValueError(f"topk_tokens // pool_size must be at most {LARGEST_CHOICE}, is {chosen_pools}")
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be positive, is {softmax_scale}")
    columns = topk_tokens + (pool_size - 1 if always_tail else 0)
    out = torch.empty(tokens, columns, dtype=torch.int32, device=q.device)
    if not tokens or not columns:
        return out
    pools_a_block = block_size // pool_size
    row = -(-max(block_table.shape[1] * pools_a_block, 1) // 64) * 64
    options = dict(score)
    block_heads = power_of_two(heads, 8)
    queries = max(1, options.pop("COLUMNS") // block_heads)
    step = min(tokens, max(1, SCRATCH_BYTES // (4 * row) // queries) * queries)
    most = candidates_of(chosen_pools)
    scores = torch.empty(step, row, dtype=torch.float32, device=q.device)
    lanes = 32 * choose["num_warps"]
    found = torch.empty(step, most + 16 * lanes, dtype=torch.int64, device=q.device)
    q, weights = q.contiguous(), weights.contiguous()
    runs = -(-row // (options["TILES"] * options["BLOCK_P"]))
    for first in range(0, tokens, step):
        end = min(first + step, tokens)
        if row > chosen_pools > 0:
            score_queries[(-(-(end - first) // queries), runs)](
                q,
                weights,
                keys,
                key_scales if key_scales is not None else scores,
                block_table,
                cu_seqlens,
                start_positions,
                scores,
                first,
                end,
                len(start_positions),
                block_table.stride(0),
                row,
                chosen_pools,
                softmax_scale,
                HI=heads,
                D=width,
                P=pool_size,
                POOLS_A_BLOCK=pools_a_block,
                SCALED=key_scales is not None,
                QUERIES=queries,
                BLOCK_HI=block_heads,
                BLOCK_D=power_of_two(width, 32 if key_scales is not None else 16),
                **options,
            )
        choose_queries[(end - first,)](
            scores,
            scores.view(torch.int64),
            found,
            found.view(torch.int32),
            cu_seqlens,
            start_positions,
            out,
            first,
            len(start_positions),
            row,
            columns,
            chosen_pools,
            P=pool_size,
            ALWAYS_TAIL=always_tail,
            MOST=most,
            LANES=lanes,
            **choose,
        )
    return out
