"""Launches the Hopper kernels of sparse latent attention over FP8 rows, planned as those of `sparse_mla` are."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.sparse_mla._hopper import HEADS, Plan, plan, serves
from day0_kernels.triton_launch import configuration

__all__ = ["attend", "serves"]

_PLAIN = {"RUN_POSITIONS": 512, "IN_TURN_FROM": 96, "PROGRAMS": 128, "MOST_PIECES": 4}


def attend(
    q: Tensor,
    cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    owners: Tensor | None,
    out: Tensor,
    block_size: int,
    softmax_scale: float,
) -> None:
    """Fills `out [rows, H, 512]`; `owners` int32 `[rows]` says whose a packed token is, None that this is a decode."""
    from day0_kernels.fp8_sparse_mla._triton_hopper import attend_pairs
    from day0_kernels.sparse_mla._triton_hopper import APART, IN_TURN, WHOLE
    from day0_kernels.sparse_mla._triton_runs import join_runs

    rows, heads, width = q.shape
    positions, value_dim = topk_indices.shape[1], out.shape[2]
    groups = -(-heads // HEADS)
    how = Plan(1, max(1, positions), False, 1)
    if owners is None:
        how = plan(rows, groups, positions, configuration(__file__, q.device, "attend_pairs", heads, _PLAIN))
    mode, parts, peaks, totals = WHOLE, out, out, out
    if how.apart:
        mode = APART
        parts = torch.empty(rows, how.runs, heads, value_dim, dtype=torch.float32, device=q.device)
        peaks = torch.empty(rows, how.runs, heads, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(peaks)
    elif how.runs > 1:
        mode = IN_TURN
        parts = torch.empty(rows, groups, HEADS * value_dim, dtype=torch.float32, device=q.device)
    attend_pairs[(rows * groups, how.runs if how.apart else 1, how.pieces)](
        q,
        cache.view(torch.int32),
        cache.view(torch.bfloat16),
        topk_indices,
        block_table,
        block_table if owners is None else owners,
        out,
        parts,
        peaks,
        totals,
        positions,
        how.run_width,
        block_table.stride(0),
        softmax_scale,
        PACKED=owners is not None,
        MODE=mode.value,
        BLOCK_SIZE=block_size,
        H=heads,
        R=width,
        V=value_dim,
        ROW_BYTES=cache.shape[1],
        PIECES=how.pieces,
        SCAN=1024,
        num_warps=4,
    )
    if how.apart:
        # Its launch need not wait for the end of the one before, it does so itself.
        join_runs[(rows, heads)](
            parts,
            peaks,
            totals,
            out,
            out,
            SINKS=False,
            H=heads,
            V=value_dim,
            RUNS=how.runs,
            num_warps=4,
            launch_pdl=True,
        )
