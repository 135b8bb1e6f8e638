"""Checks of index selection and sparse latent attention under Triton's interpreter, a line of JSON for each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_sparse_checks`), because Triton decides when it
is imported whether it interprets. `test_triton_sparse.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from day0_kernels import registry
from day0_kernels.comparison import compare, judge_backend, run, same_bits
from day0_kernels.index_select import reference as index_reference
from day0_kernels.index_select import triton as index_select
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.sparse_mla import reference as mla_reference
from day0_kernels.sparse_mla import triton as sparse_mla
from day0_kernels.spec import Case, Tolerance
from tests.kernels.check_process import answer_checks

REFERENCES = {"index_select": index_reference, "sparse_mla": mla_reference}
BACKENDS = {"index_select": index_select, "sparse_mla": sparse_mla}
_MLA = {"block_size": 16, "softmax_scale": 0.1, "value_dim": 64}
# Beside the specs' own: more positions than a run, a tail behind a full list, rotary columns, heads beyond a tile.
CASES: Mapping[tuple[str, str], Case] = {
    ("sparse_mla_decode", "runs"): Case(
        "runs",
        {"H": 3, "R": 80, "V": 64, "W": 400, "num_blocks": 80, "block_size": 16},
        (1,) * 6,
        tuple(length - 1 for length in (1, 223, 224, 225, 410, 0)),
        _MLA,
    ),
    ("sparse_mla_decode", "one_position"): Case(
        "one_position",
        {"H": 1, "R": 64, "V": 64, "W": 1, "num_blocks": 4, "block_size": 16},
        (1, 1),
        (0, 20),
        _MLA,
    ),
    ("sparse_mla_decode", "many_heads"): Case(
        "many_heads",
        {"H": 65, "R": 64, "V": 64, "W": 33, "num_blocks": 8, "block_size": 16},
        (1, 1),
        (31, 32),
        _MLA,
    ),
    ("sparse_mla_prefill", "short"): Case(
        "short",
        {"H": 2, "R": 32, "V": 24, "W": 33, "num_blocks": 16, "block_size": 16},
        (3, 1, 2, 4),
        (30, 0, 15, 62),
        _MLA | {"value_dim": 24},
    ),
    ("sparse_mla_prefill", "many_sequences"): Case(
        "many_sequences",
        {"H": 2, "R": 80, "V": 64, "W": 9, "num_blocks": 16, "block_size": 16},
        tuple({0: 2, 100: 1, 255: 3, 256: 2, 257: 1}.get(b, 0) for b in range(258)),
        tuple({0: 3, 255: 16}.get(b, 0) for b in range(258)),
        _MLA,
    ),
}


def _operator(name: str) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Operator, our function and the reference's."""
    folder = name.rsplit("_", 1)[0]
    return registry.operator(name), getattr(BACKENDS[folder], name), getattr(REFERENCES[folder], name)


def _case(name: str, case: str) -> Case:
    return CASES.get((name, case)) or next(one for one in registry.operator(name).cases if one.name == case)


def check_case(name: str, case: str, dtype: str) -> None:
    """Right within the spec's tolerance, the same bits twice, and blocks at both edges."""
    operator, fn, reference = _operator(name)
    for seed in (0,) if case in ("runs", "many_sequences") else (0, 1):
        inputs = make_inputs(operator, _case(name, case), seed=seed, dtype=getattr(torch, dtype))
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


def check_prefill_is_decode() -> None:
    """A token of a packed call has what a decode of its sequence has."""
    inputs = make_inputs(*(registry.operator("sparse_mla_prefill"), _case("sparse_mla_prefill", "short")))
    tensors: dict[str, Any] = dict(inputs.tensors)
    scalars: dict[str, Any] = dict(inputs.scalars)
    got = sparse_mla.sparse_mla_prefill(**tensors, **scalars)
    bounds = tensors.pop("cu_seqlens").tolist()
    for b, (begin, end) in enumerate(pairwise(bounds)):
        row = slice(end - 1, end)
        call = {**tensors, "q": tensors["q"][row], "topk_indices": tensors["topk_indices"][row]}
        call["block_table"] = tensors["block_table"][b : b + 1]
        alone = sparse_mla.sparse_mla_decode(**call, **scalars)
        compared = compare("out", got[row], alone, Tolerance({"float32": 1e-6}, {"float32": 1e-6}))
        assert end > begin and compared.within, compared


def _selection(values: Tensor, lengths: list[int], pool: int, topk: int, *, block: int = 16) -> tuple[Tensor, Tensor]:
    """Ours and the reference's choice where the score of pool p of every row is `values[p]`, exactly."""
    per_block = block // pool
    blocks = -(-len(values) // per_block)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(len(values))).int()
    keys = torch.full((blocks * per_block, 2), torch.nan)
    pools = torch.arange(len(values))
    rows = table.long()[pools // per_block] * per_block + pools % per_block
    keys[rows, 0], keys[rows, 1] = values, 0.0
    # The second head turns the sign of what the first lost in the relu.
    call: dict[str, Any] = {
        "q": torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]).repeat(len(lengths), 1, 1),
        "weights": torch.tensor([[1.0, -1.0]]).repeat(len(lengths), 1),
        "pool_cache": keys,
        "block_table": torch.cat([table, table.new_tensor([-1])]).repeat(len(lengths), 1),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
    }
    scalars: dict[str, Any] = {
        "pool_size": pool,
        "topk_tokens": topk,
        "block_size": block,
        "softmax_scale": 1.0,
        "always_tail": True,
    }
    # The interpreter takes as long for a narrow tile as for a wide one.
    score = mock.patch.dict(index_select._EXACT_SCORE, BLOCK_P=128 if len(values) <= 130 else 1024)
    with score, mock.patch.object(index_select, "configuration", lambda *_: {"TILE": 1024}):
        got = index_select.index_select_decode(**call, **scalars)
    wanted = index_reference.index_select_decode(**call, **scalars)
    return got, wanted


def _values(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if kind == "zeros":
        return torch.zeros(count)
    if kind == "few":
        return torch.randint(-2, 3, (count,), generator=generator).float()
    if kind == "rising":
        return torch.arange(count).float()
    if kind == "close":
        # Neighbours in the last bit, on both sides of zero: every digit of the order decides.
        bits = torch.randint(0, 4000, (count,), generator=generator) + 0x3F800000
        return bits.int().view(torch.float32) * (torch.randint(0, 2, (count,), generator=generator) * 2 - 1)
    if kind == "broken":
        made = torch.randint(-2, 3, (count,), generator=generator).float()
        made[::3], made[1::5] = torch.nan, -0.0
        return made
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-30, 30, (count,), generator=generator)


def check_choice(kind: str) -> None:
    """Exact where scores are equal, one bit apart, of any size or NaN, at every edge of list, pool, block and tile."""
    lengths = [0, 1, 4, 15, 16, 17, 19, 20, 21, 23, 24, 64 * 4, 65 * 4 - 1, 130 * 4]
    got, wanted = _selection(_values(kind, 130), lengths, 4, 20)
    differs = (got != wanted).any(1).nonzero().flatten().tolist()
    assert not differs, [(lengths[row], got[row].tolist(), wanted[row].tolist()) for row in differs[:1]]


def check_tiles(kind: str) -> None:
    """More pools than a tile of the choice has, the list's end in another tile than its threshold's equals."""
    for lengths, topk in (([1024, 1025, 2049, 2500], 1024), ([2500, 1000], 7)):
        got, wanted = _selection(_values(kind, 2500), lengths, 1, topk)
        assert torch.equal(got, wanted), (got != wanted).nonzero()[:4].tolist()


def check_refused() -> None:
    """What the kernels cannot do has a reason, what they would read wrongly is an error that names it."""
    cpu = torch.device("cpu")
    assert sparse_mla.refusal("sparse_mla_decode", cpu, torch.bfloat16, {"H": 129}) == "H must be at most 128, is 129"
    beyond = sparse_mla.refusal("sparse_mla_decode", cpu, torch.bfloat16, {"R": 600, "V": 512})
    assert beyond == "R must be value_dim to value_dim + 64, is 600 with value_dim 512"
    assert (
        index_select.refusal("index_select_decode", cpu, torch.bfloat16, {"HI": 65}) == "HI must be at most 64, is 65"
    )
    for module, name, argument in (
        (sparse_mla, "sparse_mla_decode", "latents"),
        (index_select, "index_select_decode", "pool_cache"),
    ):
        operator = registry.operator(name)
        inputs = make_inputs(operator, _case(name, "one"))
        for wrong in (inputs.tensors[argument].bfloat16(), inputs.tensors[argument].repeat(1, 2)[:, ::2]):
            try:
                getattr(module, name)(**{**inputs.tensors, argument: wrong}, **inputs.scalars)
            except ValueError as error:
                assert f"{argument} must be contiguous" in str(error), error
            else:
                raise AssertionError(f"not refused: {argument}")


CHECKS: Mapping[str, Callable[..., None]] = {
    "case": check_case,
    "neighbours": check_neighbours,
    "prefill_is_decode": check_prefill_is_decode,
    "choice": check_choice,
    "tiles": check_tiles,
    "refused": check_refused,
}


if __name__ == "__main__":
    answer_checks(CHECKS)
