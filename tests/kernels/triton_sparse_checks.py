"""Checks of sparse latent attention under Triton's interpreter, a line of JSON for each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_sparse_checks`), because Triton decides when it
is imported whether it interprets. `test_triton_sparse.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from day0_kernels import registry
from day0_kernels.comparison import compare, judge_backend, run, same_bits
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.sparse_mla import reference as mla_reference
from day0_kernels.sparse_mla import triton as sparse_mla
from day0_kernels.spec import Case, Tolerance
from tests.kernels.check_process import answer_checks

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
    ("sparse_mla_sinks_decode", "runs"): Case(
        "runs",
        {"H": 3, "R": 80, "V": 64, "W": 400, "num_blocks": 80, "block_size": 16},
        (1,) * 4,
        (0, 223, 409, 0),
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
    return registry.operator(name), getattr(sparse_mla, name), getattr(mla_reference, name)


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


def check_sinks(sink: str) -> None:
    """A sink far above or below every logit: nothing is left, or what there is without a sink."""
    operator, fn, reference = _operator("sparse_mla_sinks_decode")
    made = make_inputs(operator, _case(operator.name, "runs"), seed=1, dtype=torch.float32)
    inputs = Inputs({**made.tensors, "sinks": torch.full_like(made.tensors["sinks"], float(sink))}, made.scalars)
    judge_backend(operator, fn, reference, inputs)
    if float(sink) > 0:
        assert not run(operator, fn, inputs)["out"].any()
    else:
        without: dict[str, Any] = {name: tensor for name, tensor in inputs.tensors.items() if name != "sinks"}
        alone = sparse_mla.sparse_mla_decode(**without, **inputs.scalars)
        compared = compare(
            "out", run(operator, fn, inputs)["out"], alone, Tolerance({"float32": 1e-6}, {"float32": 1e-6})
        )
        assert compared.within, compared


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


def check_refused() -> None:
    """What the kernels cannot do has a reason, what they would read wrongly is an error that names it."""
    cpu = torch.device("cpu")
    assert sparse_mla.refusal("sparse_mla_decode", cpu, torch.bfloat16, {"H": 129}) == "H must be at most 128, is 129"
    beyond = sparse_mla.refusal("sparse_mla_decode", cpu, torch.bfloat16, {"R": 600, "V": 512})
    assert beyond == "R must be value_dim to value_dim + 64, is 600 with value_dim 512"
    inputs = make_inputs(registry.operator("sparse_mla_decode"), _case("sparse_mla_decode", "one"))
    tensors: dict[str, Any] = dict(inputs.tensors)
    latents = tensors["latents"]
    for wrong in (latents.bfloat16(), latents.repeat(1, 2)[:, ::2]):
        try:
            sparse_mla.sparse_mla_decode(**{**tensors, "latents": wrong}, **inputs.scalars)
        except ValueError as error:
            assert "latents must be contiguous" in str(error), error
        else:
            raise AssertionError("not refused: latents")
    try:
        sparse_mla.sparse_mla_sinks_decode(**tensors, sinks=torch.zeros(3), **inputs.scalars)
    except ValueError as error:
        assert "sinks must be contiguous float32 [4], is torch.float32 (3,)" in str(error), error
    else:
        raise AssertionError("not refused: sinks")


CHECKS: Mapping[str, Callable[..., None]] = {
    "case": check_case,
    "neighbours": check_neighbours,
    "sinks": check_sinks,
    "prefill_is_decode": check_prefill_is_decode,
    "refused": check_refused,
}


if __name__ == "__main__":
    answer_checks(CHECKS)
