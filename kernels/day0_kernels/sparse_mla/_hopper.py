"""Chooses how the Hopper kernels of sparse latent attention go over the positions of a call, and launches them.

A decode's positions are cut into runs, always at the same places, whose sums are joined in their order. Few rows give
each run a program of its own and join in a second launch; many rows let one program go over the runs of its row and
join as it goes. Both are the same arithmetic: a row has the same bits beside any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from day0_kernels.triton_launch import architecture, configuration

HEADS = 64
TILE = 64
VALUE_DIM = 512
TAILS = (0, 64)
# A gather moves 16 bytes at a time.
ALIGNMENT_BYTES = 16
# Positions that are taken together.
PAIR = 2 * TILE
_PLAIN = {"RUN_POSITIONS": 512, "IN_TURN_FROM": 96, "PROGRAMS": 128, "MOST_PIECES": 4}


def serves(q: Tensor, latents: Tensor, value_dim: int) -> bool:
    """Whether a call has the sizes these kernels are made for, on a machine that has their instructions."""
    from day0_kernels.triton_rounding import INTERPRETED

    return (
        not INTERPRETED.value
        and architecture(q.device) == "sm_90"
        and q.dtype in (torch.bfloat16, torch.float16)
        and value_dim == VALUE_DIM
        and q.shape[2] - value_dim in TAILS
        and q.data_ptr() % ALIGNMENT_BYTES == 0
        and latents.data_ptr() % ALIGNMENT_BYTES == 0
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """`runs` of `run_width` positions (the last may be shorter), and `pieces` programs for the value columns of each.

    `apart`: a run has programs of its own; otherwise a program has all runs of its row.
    """

    runs: int
    run_width: int
    apart: bool
    pieces: int


def plan(rows: int, groups: int, positions: int, chosen: Mapping[str, int]) -> Plan:
    """How a decode of `rows` queries, each of `groups` times 64 heads, goes over `positions`.

    Where runs begin depends on `positions` alone; what else is chosen changes no bit.
    """
    pairs = max(1, -(-positions // PAIR))
    # A few positions behind a multiple (the tail of a selection) make no run of their own.
    wanted = max(1, round(positions / chosen["RUN_POSITIONS"]))
    run_width = -(-pairs // wanted) * PAIR
    runs = max(1, -(-positions // run_width))
    apart = runs > 1 and rows * groups < chosen["IN_TURN_FROM"]
    programs, pieces = rows * groups * runs, 1
    # Every piece makes all logits, for fewer columns of values: worth it where multiprocessors would be idle.
    while apart and pieces < chosen["MOST_PIECES"] and 2 * pieces * programs <= chosen["PROGRAMS"]:
        pieces *= 2
    return Plan(runs, run_width, apart, pieces)


def attend(
    q: Tensor,
    latents: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    owners: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    block_size: int,
    softmax_scale: float,
) -> None:
    """Fills `out [rows, H, 512]`; `owners` int32 `[rows]` says whose a packed token is, None that this is a decode."""
    from day0_kernels.sparse_mla._triton_hopper import APART, IN_TURN, WHOLE, attend_pairs
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
        latents,
        topk_indices,
        block_table,
        block_table if owners is None else owners,
        out,
        parts,
        peaks,
        totals,
        out if sinks is None else sinks,
        positions,
        how.run_width,
        block_table.stride(0),
        softmax_scale,
        PACKED=owners is not None,
        MODE=mode.value,
        SINKS=sinks is not None,
        BLOCK_SIZE=block_size,
        H=heads,
        R=width,
        V=value_dim,
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
            out if sinks is None else sinks,
            out,
            SINKS=sinks is not None,
            H=heads,
            V=value_dim,
            RUNS=how.runs,
            num_warps=4,
            launch_pdl=True,
        )
