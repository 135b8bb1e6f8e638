"""Every case of every spec, for every backend that serves on a CPU: right, repeatable, silent outside its own rows."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from day0_kernels import registry
from day0_kernels.comparison import compare, judge, judge_backend, run, same_bits
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import FLOAT, Case, Operator, TensorSpec, Tolerance, shape_of
from tests.kernels.naive import NAIVE, define
from tests.kernels.parts import has_parts, parts_of, pick


def _serves(name: str, backend: str, dtype: torch.dtype = torch.float32) -> bool:
    try:
        registry.resolve(name, "cpu", dtype, backend)
    except registry.BackendRefused:
        return False
    return True


CASES = [
    pytest.param(operator, backend, case, id=f"{operator.name}-{backend}-{case.name}")
    for operator in registry.operators()
    for backend in registry.backends(operator.name)
    if _serves(operator.name, backend)
    for case in operator.cases
]
OPERATORS = [pytest.param(operator, id=operator.name) for operator in registry.operators()]


def _fn(operator: Operator, backend: str, dtype: torch.dtype = torch.float32) -> Any:
    return registry.resolve(operator.name, "cpu", dtype, backend).fn


def _wanted(operator: Operator, inputs: Inputs) -> dict[str, Tensor]:
    wanted = define(operator.name, inputs.tensors, inputs.scalars)
    for spec in (*operator.outputs, *operator.cached):
        if wanted[spec.name].is_floating_point():
            wanted[spec.name] = wanted[spec.name].float()
    return wanted


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("operator", "backend", "case"), CASES)
def test_equals_the_naive_definition(operator: Operator, backend: str, case: Case, seed: int) -> None:
    inputs = make_inputs(operator, case, seed=seed)
    judge(operator, run(operator, _fn(operator, backend), inputs), _wanted(operator, inputs))


@pytest.mark.parametrize(("operator", "backend", "case"), CASES)
def test_has_the_specified_shapes_and_the_same_bits_twice(operator: Operator, backend: str, case: Case) -> None:
    inputs = make_inputs(operator, case, seed=2)
    fn = _fn(operator, backend)
    judge_backend(operator, fn, _fn(operator, "reference"), inputs)
    results = run(operator, fn, inputs)
    table = inputs.tensors.get("block_table")
    sizes = case.sizes | ({} if table is None else {"max_blocks": table.shape[1]})
    for spec in operator.outputs:
        assert results[spec.name].shape == shape_of(spec, sizes)
        if results[spec.name].is_floating_point():
            assert results[spec.name].isfinite().all(), f"{spec.name} holds poison"


def _widened(tolerance: Tolerance, dtype: str) -> Tolerance:
    return Tolerance({"float32": tolerance.absolute[dtype]}, {"float32": tolerance.relative[dtype]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("operator", "backend", "case"), CASES)
def test_narrow_floats_are_widened_inside(operator: Operator, backend: str, case: Case, dtype: torch.dtype) -> None:
    if not _serves(operator.name, backend, dtype):
        pytest.skip("the backend refuses this dtype")
    inputs = make_inputs(operator, case, dtype=dtype)
    results = run(operator, _fn(operator, backend, dtype), inputs)
    wanted = _wanted(operator, inputs)
    name = str(dtype).removeprefix("torch.")
    for key, result in results.items():
        wide = result.float() if result.is_floating_point() else result
        compared = compare(key, wide, wanted[key], _widened(operator.tolerance, name))
        assert compared.within, compared


@pytest.mark.parametrize("operator", OPERATORS)
def test_signature_is_the_spec(operator: Operator) -> None:
    parameters = [tensor.name for tensor in operator.tensors] + list(operator.scalars)
    for backend in registry.backends(operator.name):
        if _serves(operator.name, backend):
            assert list(inspect.signature(_fn(operator, backend)).parameters) == parameters
    assert operator.name in NAIVE
    for case in operator.cases:
        assert set(case.scalars) == set(operator.scalars), case.name


# What one row's result must not depend on: the other rows. Each row, or sequence, is run alone and among the others.


WITH_ROWS = [param for param in CASES if has_parts(param.values[0])]  # type: ignore[arg-type]


@pytest.mark.parametrize(("operator", "backend", "case"), WITH_ROWS)
def test_a_row_does_not_feel_its_neighbours(operator: Operator, backend: str, case: Case) -> None:
    _check_neighbours(operator, backend, case)


@pytest.mark.parametrize(
    "param",
    [pytest.param(param, id=param.id) for param in CASES if param.id.endswith(("-deep", "-batch", "-many"))],
)
def test_nor_with_more_threads(param: Any) -> None:
    torch.set_num_threads(2)
    _check_neighbours(*param.values)


def _check_neighbours(operator: Operator, backend: str, case: Case) -> None:
    inputs = make_inputs(operator, case, seed=3)
    fn, count = _fn(operator, backend), parts_of(operator, case)
    whole = run(operator, fn, inputs)
    backwards = list(range(count))[::-1]
    for groups in ([[part] for part in backwards], [backwards], [backwards[::2], backwards[1::2]]):
        caches = {tensor.name: inputs.tensors[tensor.name] for tensor in operator.cached}
        for group in filter(None, groups):
            picked, rows = pick(operator, inputs, group)
            results = run(operator, fn, Inputs({**picked.tensors, **caches}, picked.scalars))
            caches = {name: results[name] for name in caches}
            for spec in operator.outputs:
                assert same_bits(results[spec.name], whole[spec.name][rows]), f"{spec.name} of {group}"
        for name, cache in caches.items():
            assert same_bits(cache, whole[name]), f"{name} after {groups}"


STEPPED = (
    "index_select_prefill",
    "fp8_index_select_prefill",
    "sparse_mla_prefill",
    "fp8_sparse_mla_prefill",
    "gated_delta_prefill",
    "expert_gemm",
    "mxfp4_expert_gemm",
    "fp8_expert_gemm",
)


@pytest.mark.parametrize("elements", [1, 7000])
@pytest.mark.parametrize("name", STEPPED)
def test_a_long_call_is_done_in_steps_with_the_same_bits(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references bound their memory by GROUP_ELEMENTS; small cases would never take a second step."""
    operator, fn = registry.operator(name), _fn(registry.operator(name), "reference")
    for case in operator.cases:
        inputs = make_inputs(operator, case, seed=7)
        whole = run(operator, fn, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[fn.__module__], "GROUP_ELEMENTS", elements)
            stepped = run(operator, fn, inputs)
        assert all(same_bits(stepped[key], whole[key]) for key in whole), case.name


def _moved(operator: Operator, inputs: Inputs) -> Inputs:
    """The same sequences in other blocks and state slots."""
    tensors = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
    for tensor in operator.tensors:
        if tensor.shape[0] == "states":
            tensors[tensor.name] = tensors[tensor.name].roll(1, 0)
        elif isinstance(tensor.shape[0], str) and tensor.shape[0].startswith("num_blocks"):
            per_block = _rows_per_block(inputs, tensor)
            tensors[tensor.name] = tensors[tensor.name].roll(per_block, 0)
    if "state_slots" in tensors:
        states = len(inputs.tensors[next(t.name for t in operator.tensors if t.shape[0] == "states")])
        tensors["state_slots"] = torch.where(tensors["state_slots"] < 0, -1, (tensors["state_slots"] + 1) % states)
    if "block_table" in tensors:
        cache = next(t for t in operator.tensors if str(t.shape[0]).startswith("num_blocks"))
        blocks = len(inputs.tensors[cache.name]) // _rows_per_block(inputs, cache)
        tensors["block_table"] = torch.where(tensors["block_table"] < 0, -1, (tensors["block_table"] + 1) % blocks)
    return Inputs({name: tensor.to(inputs.tensors[name].dtype) for name, tensor in tensors.items()}, inputs.scalars)


def _rows_per_block(inputs: Inputs, cache: TensorSpec) -> int:
    if cache.shape[0] == "num_blocks":
        return 1
    pool = inputs.scalars.get("pool_size") or (len(inputs.tensors["ape"]) if "ape" in inputs.tensors else 1)
    return int(inputs.scalars["block_size"]) // pool


PLACED = [
    param
    for param in CASES
    if {"block_table", "state_slots"} & {tensor.name for tensor in param.values[0].tensors}  # type: ignore[union-attr]
]


@pytest.mark.parametrize(("operator", "backend", "case"), PLACED)
def test_the_place_in_the_caches_does_not_matter(operator: Operator, backend: str, case: Case) -> None:
    inputs = make_inputs(operator, case, seed=4)
    fn = _fn(operator, backend)
    here, there = run(operator, fn, inputs), run(operator, fn, _moved(operator, inputs))
    for spec in operator.outputs:
        assert same_bits(here[spec.name], there[spec.name])
    for tensor in operator.cached:
        shift = 1 if tensor.shape[0] == "states" else _rows_per_block(inputs, tensor)
        assert same_bits(here[tensor.name].roll(shift, 0), there[tensor.name])


def test_every_float_dtype_has_a_tolerance() -> None:
    for operator in registry.operators():
        if not any(tensor.dtype == FLOAT for tensor in operator.tensors):
            assert not any(tensor.dtype == FLOAT for tensor in operator.outputs), operator.name
        for limits in (operator.tolerance.absolute, operator.tolerance.relative):
            assert set(limits) == {"float32", "bfloat16", "float16"}
