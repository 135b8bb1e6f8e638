"""FlashInfer's top-k of float32 scores, alone and behind DeepGEMM's scores, which together select as we do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.peers import deep_gemm
from day0.bench.ops.peers.index_scores import DecodeInputs, PrefillInputs, Size, definition
from day0.bench.ops.peers.peer import Peer, installed, load
from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for

MODULE = "flashinfer"
# Share of ids that may differ: another order of summation moves scores a bit apart.
MOST_OTHER_IDS = 5e-3


def chooser(rows: int, chosen: int, lengths: Tensor) -> Callable[[Tensor], Tensor]:
    """What picks `chosen` ids of each row of scores, of the first `lengths` columns."""
    first, pick = torch.zeros(rows, dtype=torch.int32, device="cuda"), load(MODULE).top_k_ragged_transform
    return lambda scores: pick(scores, first, lengths, chosen)


def other_ids(out: Tensor, scores: Tensor, chosen: int) -> float:
    """Share of a row's chosen ids that are not among the best of `scores` `[n, keys]`, the worst row of all."""
    worst = 0.0
    for ids, row in zip(out.long(), scores, strict=True):
        found, count = ids[ids >= 0], min(chosen, int(row.isfinite().sum()))
        best = row.topk(count).indices
        if len(found.unique()) != count:
            return float("inf")
        worst = max(worst, 1 - float(torch.isin(found, best).float().mean()))
    return worst


def top_k(size: Size, operator: str, name: str) -> Shape:
    """On random scores of the size index selection has; a floor of its own, scores read and ids written."""
    rows = size.batch or PrefillInputs.tokens
    size_bytes = rows * (size.keys + size.chosen) * 4
    scores = [torch.randn(rows, size.keys, device="cuda") for _ in range(sets_for(size_bytes))]
    lengths = torch.full((rows,), size.keys, dtype=torch.int32, device="cuda")
    choose, some = chooser(rows, size.chosen, lengths), sorted({0, rows // 2, rows - 1})
    wanted = scores[0][some]
    return Shape(
        operator,
        name,
        [partial(choose, one) for one in scores],
        size_bytes,
        lambda out: other_ids(out[some], wanted, size.chosen),
        0.0,
    )


def both_prefill(size: Size, operator: str, name: str) -> Shape:
    """Scores and top-k of 4,096 queries, scores in memory between the two."""
    made = PrefillInputs(size)
    score, choose = deep_gemm.prefill_scores(made), chooser(made.tokens, size.chosen, made.end)
    some = [made.tokens // 2 + 7, made.tokens - 1]
    wanted = definition(made.q[some], made.keys, made.scales, made.weights[some])
    for row, query in zip(wanted, some, strict=True):
        row[int(made.end[query]) :] = -torch.inf
    read = made.tokens * (made.size.heads * 132 + size.chosen * 4) + size.keys * 132
    return Shape(
        operator,
        name,
        [lambda: choose(score())],
        read,
        lambda out: other_ids(out[some], wanted, size.chosen),
        MOST_OTHER_IDS,
        made.flops,
        "fp8",
    )


def both_decode(size: Size, operator: str, name: str) -> Shape:
    """Scores and top-k of one query of each sequence."""
    made = DecodeInputs(size)
    choose = chooser(size.batch, size.chosen, made.lengths)
    scores = [deep_gemm.decode_scores(made, *one) for one in made.sets]
    some = sorted({0, size.batch - 1})
    wanted = torch.stack([made.wanted(row) for row in some])
    return Shape(
        operator,
        name,
        [partial(lambda score: choose(score()[:, : size.keys].contiguous()), score) for score in scores],
        made.size_bytes - size.batch * (size.keys - size.chosen) * 4,
        lambda out: other_ids(out[some], wanted, size.chosen),
        MOST_OTHER_IDS,
        made.flops,
        "fp8",
    )


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of index selection on FP8 keys."""
    if not installed(MODULE) or not operator.startswith("fp8_index_select"):
        return
    size = Size.of(shape)
    if size is None or size.keys <= size.chosen:
        return
    yield Peer(MODULE, "top_k_ragged_transform", partial(top_k, size, operator, shape), "top-k alone")
    if installed(deep_gemm.MODULE):
        make = partial(both_decode if size.batch else both_prefill, size, operator, shape)
        yield Peer(MODULE, "top_k behind deep_gemm scores", make, "two kernels, scores in memory")
