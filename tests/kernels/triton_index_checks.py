"""Checks of index selection under Triton's interpreter, a line of JSON for each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_index_checks`), because Triton decides when it
is imported whether it interprets. `test_triton_index.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from day0_kernels import registry
from day0_kernels.comparison import judge_backend, run, same_bits
from day0_kernels.fp8_index_select import reference as fp8_reference
from day0_kernels.fp8_index_select import triton as fp8_index_select
from day0_kernels.index_select import _choice
from day0_kernels.index_select import reference as index_reference
from day0_kernels.index_select import triton as index_select
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import Case
from tests.kernels.check_process import answer_checks

REFERENCES = {"index_select_decode": index_reference, "fp8_index_select_decode": fp8_reference}
BACKENDS = {"index_select_decode": index_select, "fp8_index_select_decode": fp8_index_select}


def _operator(name: str) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Operator, our function and the reference's."""
    return registry.operator(name), getattr(BACKENDS[name], name), getattr(REFERENCES[name], name)


def _case(name: str, case: str) -> Case:
    return next(one for one in registry.operator(name).cases if one.name == case)


# All pools are candidates of one program; or they are gathered, and one program holds them; or more than it holds.
WAYS: Mapping[str, Mapping[str, int]] = {
    "flat": {},
    "few": {"TILE": 16, "LEAST_LANES": 32, "MOST_LANES": 32},
    "many": {"TILE": 16, "LEAST_LANES": 8, "MOST_LANES": 8, "MOST_PARTS": 4},
    "wide": {"TILE": 1024, "MOST_LANES": 1024},
}


@contextmanager
def _chosen(way: str) -> Iterator[None]:
    with mock.patch.dict(vars(_choice), WAYS[way]):
        yield


def check_case(name: str, case: str, dtype: str, way: str) -> None:
    """Right within the spec's tolerance, the same bits twice, and blocks at both edges."""
    operator, fn, reference = _operator(name)
    for seed in (0, 1):
        inputs = make_inputs(operator, _case(name, case), seed=seed, dtype=getattr(torch, dtype))
        with _chosen(way):
            judge_backend(operator, fn, reference, inputs)


def check_whole_blocks(case: str) -> None:
    """Two tiles a block: pools of one token in blocks of 16."""
    tile = {"BLOCK_P": 8, "TILES": 3, "STAGES": 2, "num_warps": 4, "OVERLAP": 0}
    found = _case("fp8_index_select_decode", case)
    found = replace(found, dims={**found.dims, "P": 1}, scalars={**found.scalars, "pool_size": 1})
    with mock.patch.object(fp8_index_select, "configuration", lambda *_: tile), _chosen("few"):
        for width in (16, 32):
            operator, fn, reference = _operator("fp8_index_select_decode")
            inputs = make_inputs(operator, replace(found, dims={**found.dims, "D": width}))
            judge_backend(operator, fn, reference, inputs)


def check_neighbours(name: str, case: str) -> None:
    """Each sequence alone has the bits it has among the others."""
    operator, fn, _ = _operator(name)
    found = _case(name, case)
    inputs = make_inputs(operator, found, seed=3, dtype=torch.bfloat16)
    whole = run(operator, fn, inputs)
    for b in range(len(found.new_tokens)):
        alone = {
            tensor.name: inputs.tensors[tensor.name][b : b + 1]
            if tensor.shape[0] == "B"
            else inputs.tensors[tensor.name]
            for tensor in operator.tensors
        }
        for key, result in run(operator, fn, Inputs(alone, inputs.scalars)).items():
            assert same_bits(result, whole[key][b : b + 1]), f"{key} of sequence {b}"


def _blocks(values: Tensor, per_block: int) -> tuple[Tensor, Tensor]:
    """Block table of enough blocks in any order, and the cache row of each pool."""
    blocks = -(-len(values) // per_block)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(len(values))).int()
    pools = torch.arange(len(values))
    return table, table.long()[pools // per_block] * per_block + pools % per_block


def _float_call(values: Tensor, per_block: int) -> tuple[dict[str, Tensor], Tensor]:
    table, rows = _blocks(values, per_block)
    keys = torch.full((len(table) * per_block, 2), torch.nan)
    keys[rows, 0], keys[rows, 1] = values, 0.0
    return {"q": torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), "pool_cache": keys}, table


def _fp8_call(values: Tensor, per_block: int) -> tuple[dict[str, Tensor], Tensor]:
    """The sign is the key's, the magnitude its scale's."""
    table, rows = _blocks(values, per_block)
    bits = torch.full((len(table) * per_block, 4), 0xFF, dtype=torch.uint8)
    bits[rows] = torch.tensor([0x38, 0, 0, 0], dtype=torch.uint8) | (values.signbit() * 0x80).to(torch.uint8)[:, None]
    scales = torch.full((len(table) * per_block, 1), torch.nan)
    scales[rows, 0] = values.abs()
    halves = [part.view(torch.uint8).view(len(table), -1) for part in (bits, scales)]
    query = torch.tensor([[0x38, 0, 0, 0], [0xB8, 0, 0, 0]], dtype=torch.uint8)
    return {"q": query, "key_cache": torch.cat(halves, 1)}, table


def _selection(name: str, values: Tensor, lengths: list[int], pool: int, topk: int, way: str) -> tuple[Tensor, Tensor]:
    """Ours and the reference's choice where the score of pool p of every row is `values[p]`, exactly."""
    block, rows = 16, len(lengths)
    # The second head turns the sign of what the first lost in the relu.
    call, table = (_fp8_call if name.startswith("fp8") else _float_call)(values, block // pool)
    call |= {
        "q": call["q"].repeat(rows, 1, 1),
        "weights": torch.tensor([[1.0, -1.0]]).repeat(rows, 1),
        "block_table": torch.cat([table, table.new_tensor([-1])]).repeat(rows, 1),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
    }
    scalars: dict[str, Any] = {"pool_size": pool, "topk_tokens": topk, "block_size": block, "always_tail": True}
    if not name.startswith("fp8"):
        scalars["softmax_scale"] = 1.0
    _, fn, reference = _operator(name)
    # The interpreter takes as long for a narrow tile as for a wide one.
    wide = {"BLOCK_P": 128 if len(values) <= 130 else 1024, "TILES": 4, "STAGES": 1, "OVERLAP": 0}
    with (
        _chosen(way),
        mock.patch.dict(index_select._EXACT_SCORE, wide),
        mock.patch.object(fp8_index_select, "configuration", lambda *_: wide),
    ):
        got = fn(**call, **scalars)
    return got, reference(**call, **scalars)


def _values(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if kind == "zeros":
        return torch.zeros(count)
    few = torch.randint(-2, 3, (count,), generator=generator).float()
    if kind == "signed":
        # Zeros of both signs are equal.
        return few.clamp(max=0.0).abs().neg() * (few.abs() > 1) + few.sign() * 0.0
    if kind == "few":
        return few
    if kind == "negative":
        return torch.arange(count).float() - count - 1
    if kind == "rising":
        return torch.arange(count).float()
    if kind == "close":
        # Neighbours in the last bit, on both sides of zero: every digit of the order decides.
        bits = torch.randint(0, 4000, (count,), generator=generator) + 0x3F800000
        return bits.int().view(torch.float32) * (torch.randint(0, 2, (count,), generator=generator) * 2 - 1)
    if kind == "broken":
        few[::3], few[1::5], few[2::7], few[4::11] = torch.nan, -0.0, -torch.inf, torch.inf
        return few
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-30, 30, (count,), generator=generator)


def check_choice(name: str, kind: str, way: str) -> None:
    """Exact where scores are equal, one bit apart, of any size or NaN, at every edge of list, pool, block and group."""
    lengths = [0, 1, 4, 15, 16, 17, 19, 20, 21, 23, 24, 25, 32, 33, 64 * 4 - 1, 64 * 4, 65 * 4 - 1, 130 * 4]
    got, wanted = _selection(name, _values(kind, 130), lengths, 4, 20, way)
    differs = (got != wanted).any(1).nonzero().flatten().tolist()
    assert not differs, [(lengths[row], got[row].tolist(), wanted[row].tolist()) for row in differs[:1]]


def check_many(name: str, kind: str, way: str) -> None:
    """More pools than a program scores or gathers, half of them chosen, and very few."""
    for lengths, topk in (([1024, 1025, 2049, 2500], 1024), ([2500, 1000], 7)):
        got, wanted = _selection(name, _values(kind, 2500), lengths, 1, topk, way)
        assert torch.equal(got, wanted), (got != wanted).nonzero()[:4].tolist()


def check_refused() -> None:
    """What the kernels cannot do has a reason, what they would read wrongly is an error that names it."""
    cpu = torch.device("cpu")
    for name, module in BACKENDS.items():
        assert module.refusal(name, cpu, torch.bfloat16, {"HI": 65}) == "HI must be at most 64, is 65"
        operator = registry.operator(name)
        inputs = make_inputs(operator, _case(name, "one"))
        argument = "key_cache" if name.startswith("fp8") else "pool_cache"
        for wrong in (inputs.tensors[argument].bfloat16(), inputs.tensors[argument].repeat(1, 2)[:, ::2]):
            _refuses(
                f"{argument} must be contiguous", module, name, {**inputs.tensors, argument: wrong}, inputs.scalars
            )
        wide = {**inputs.tensors, "block_table": torch.zeros(1, 600_000, dtype=torch.int32)}
        limits = "pools a sequence must be at most 2097152 and topk_tokens // pool_size at most 8192, are "
        _refuses(f"{limits}2400000 and 16", module, name, wide, inputs.scalars)
        wide["block_table"] = wide["block_table"][:, :30_000]
        _refuses(f"{limits}120000 and 10000", module, name, wide, {**inputs.scalars, "topk_tokens": 40_000})
    unaligned = fp8_index_select.refusal("fp8_index_select_decode", cpu, torch.bfloat16, {"D": 18})
    assert unaligned == "D must be a multiple of 4, so that scales are aligned, is 18"


def _refuses(message: str, module: Any, name: str, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
    try:
        getattr(module, name)(**tensors, **scalars)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")


CHECKS: Mapping[str, Callable[..., None]] = {
    "case": check_case,
    "whole_blocks": check_whole_blocks,
    "neighbours": check_neighbours,
    "choice": check_choice,
    "many": check_many,
    "refused": check_refused,
}


if __name__ == "__main__":
    answer_checks(CHECKS)
