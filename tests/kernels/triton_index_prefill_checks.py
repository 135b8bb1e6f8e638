"""Checks of index selection's prefill under Triton's interpreter, a line of JSON for each.

A process of its own, because Triton decides when it is imported whether it interprets. `test_triton_index_prefill.py`
starts it and says which checks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from day0_kernels import registry
from day0_kernels.comparison import judge_backend, run, same_bits
from day0_kernels.fp8_index_select import reference as fp8_reference
from day0_kernels.fp8_index_select import triton as fp8_index_select
from day0_kernels.index_select import _prefill, triton
from day0_kernels.index_select import reference as index_reference
from day0_kernels.index_select._triton_gate import choose_queries
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import Case
from tests.kernels.check_process import answer_checks

FUNCTIONS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "index_select_prefill": (triton.index_select_prefill, index_reference.index_select_prefill),
    "fp8_index_select_prefill": (
        fp8_index_select.fp8_index_select_prefill,
        fp8_reference.fp8_index_select_prefill,
    ),
}
# Blocks as long as a tile of keys, and tiles of whole blocks; groups of queries with several sequences, one empty.
CASES: Mapping[str, Case] = {
    "block_of_a_tile": Case(
        "block_of_a_tile",
        {"HI": 3, "D": 32, "P": 1, "num_blocks": 24, "block_size": 64, "W": 16},
        (5, 0, 1, 9, 3),
        (60, 7, 127, 120, 0),
        {"pool_size": 1, "topk_tokens": 16, "block_size": 64, "always_tail": False},
    ),
    "tile_of_blocks": Case(
        "tile_of_blocks",
        {"HI": 3, "D": 32, "P": 4, "num_blocks": 48, "block_size": 16, "W": 19},
        (5, 0, 1, 9, 3),
        (60, 7, 263, 250, 0),
        {"pool_size": 4, "topk_tokens": 16, "block_size": 16, "always_tail": True},
    ),
}


def _case(name: str, case: str) -> Case:
    found = CASES.get(case) or next(one for one in registry.operator(name).cases if one.name == case)
    missing = {} if name.startswith("fp8") else {"softmax_scale": 0.25}
    return replace(found, scalars={**missing, **found.scalars})


def check_case(name: str, case: str, dtype: str) -> None:
    """Right within the spec's tolerance, the same bits twice."""
    inputs = make_inputs(registry.operator(name), _case(name, case), seed=1, dtype=getattr(torch, dtype))
    judge_backend(registry.operator(name), *FUNCTIONS[name], inputs)


def check_broken(name: str) -> None:
    """Pools of NaN scores are chosen last, the lowest first, where there are too few others."""
    inputs = make_inputs(registry.operator(name), _case(name, "continued"), seed=4, dtype=torch.float16)
    key = "key_cache" if name.startswith("fp8") else "pool_cache"
    broken = inputs.tensors[key].clone()
    if name.startswith("fp8"):
        # The scales of three blocks in four: the interpreter takes the NaN of e4m3 for 480.
        scales = broken.view(torch.float32)
        scales[torch.arange(len(broken)) % 4 != 1, -4:] = torch.nan
    else:
        broken[torch.arange(len(broken)) % 4 != 1] = torch.nan
    judge_backend(registry.operator(name), *FUNCTIONS[name], Inputs({**inputs.tensors, key: broken}, inputs.scalars))


def check_steps(name: str, case: str) -> None:
    """Scratch for a few tokens gives what scratch for all gives."""
    operator, fn = registry.operator(name), FUNCTIONS[name][0]
    inputs = make_inputs(operator, _case(name, case), seed=2, dtype=torch.bfloat16)
    whole = run(operator, fn, inputs)
    with mock.patch.object(_prefill, "SCRATCH_BYTES", 1):
        stepped = run(operator, fn, inputs)
    assert same_bits(whole["topk_indices"], stepped["topk_indices"])


def check_neighbours(name: str, case: str) -> None:
    """Each sequence alone, where its tokens stand elsewhere in a group, has the bits it has among the others."""
    operator, fn = registry.operator(name), FUNCTIONS[name][0]
    found = _case(name, case)
    inputs = make_inputs(operator, found, seed=3, dtype=torch.bfloat16)
    whole = run(operator, fn, inputs)["topk_indices"]
    bounds = inputs.tensors["cu_seqlens"].tolist()
    for b, new in enumerate(found.new_tokens):
        rows = slice(bounds[b], bounds[b + 1])
        alone = dict(inputs.tensors) | {"cu_seqlens": torch.tensor([0, new], dtype=torch.int32)}
        alone |= {key: alone[key][rows] for key in ("q", "weights")}
        alone |= {key: alone[key][b : b + 1] for key in ("block_table", "start_positions")}
        got = run(operator, fn, Inputs(alone, inputs.scalars))["topk_indices"]
        assert same_bits(got, whole[rows]), f"sequence {b}"


def _values(kind: str, rows: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    normal = torch.randn(rows, count, generator=generator)
    few = torch.randint(-2, 3, (rows, count), generator=generator).float()
    # Every 64 pools hold one run of 8 that a sample of 2,500 pools is likely to see.
    seen = torch.arange(count) % 64 < 8
    if kind == "broken":
        few[:, ::3], few[:, 1::5] = torch.nan, -0.0
    made = {
        "normal": normal,
        "zeros": torch.zeros(rows, count),
        "few": few,
        "broken": few,
        "nan": torch.full((rows, count), torch.nan),
        "rising": torch.arange(count).float().expand(rows, -1),
        "sample_too_high": normal + 10 * seen,
        "sample_too_low": normal - 10 * seen,
        # Neighbours in the last bit: every digit decides.
        "close": (torch.randint(0, 4000, (rows, count), generator=generator) + 0x3F800000).int().view(torch.float32),
        "any_size": normal * 10.0 ** torch.randint(-30, 30, (rows, count), generator=generator),
    }
    return made[kind]


def check_choice(kind: str) -> None:
    """The best of given scores at the edges of the choice, the gate and the tile, in scratch that was never cleared."""
    for lengths, chosen, pool_size, tail in (
        ([257, 256, 101, 100, 99, 1, 1500, 2500], 100, 1, False),
        ([2500, 2049], 7, 1, False),
        ([10003, 3601, 103], 25, 4, True),
    ):
        length = torch.tensor(lengths)
        rows = len(lengths)
        scores = _values(kind, rows, 2560).nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0
        width = chosen * pool_size + (pool_size - 1 if tail else 0)
        out = torch.full((rows, width), 2**31 - 1, dtype=torch.int32)
        found = torch.full((rows, 256 + 16 * 64), 2**62)
        choose_queries[(rows,)](
            scores,
            scores.view(torch.int64),
            found,
            found.view(torch.int32),
            torch.arange(rows + 1).int(),
            length.int() - 1,
            out,
            0,
            rows,
            scores.shape[1],
            width,
            chosen,
            P=pool_size,
            ALWAYS_TAIL=tail,
            LANES=64,
            TILE=1024,
            MOST=256,
        )
        best = index_reference.best(scores.clone(), length // pool_size, chosen)
        wanted = index_reference.chosen_positions(best, length, pool_size, chosen * pool_size, tail)
        differs = (out != wanted).any(1).nonzero().flatten().tolist()
        assert not differs, [(lengths[row], out[row].tolist(), wanted[row].tolist()) for row in differs[:1]]


def check_refused() -> None:
    """What the kernels would read wrongly or cannot hold is an error that names it."""
    name = "index_select_prefill"
    inputs = make_inputs(registry.operator(name), _case(name, "sparse"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pool_cache": inputs.tensors["pool_cache"].bfloat16()}, "pool_cache must be contiguous torch.float32"),
        ({"topk_tokens": 4 * 8193}, "topk_tokens // pool_size must be at most 8192, is 8193"),
        ({"softmax_scale": -1.0}, "softmax_scale must be positive, is -1.0"),
    ]
    for change, message in wrong:
        try:
            triton.index_select_prefill(**{**inputs.tensors, **inputs.scalars, **change})
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"not refused: {message}")


CHECKS: Mapping[str, Callable[..., None]] = {
    "case": check_case,
    "broken": check_broken,
    "steps": check_steps,
    "neighbours": check_neighbours,
    "choice": check_choice,
    "refused": check_refused,
}


if __name__ == "__main__":
    answer_checks(CHECKS)
