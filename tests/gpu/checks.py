"""What a Triton backend must show on a GPU in one case: right, repeatable, captured, without regard to neighbours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from day0_kernels import registry
from day0_kernels.comparison import Mismatch, judge_backend, run, same_bits
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import FLOAT, Case, Operator
from tests.gpu.more_cases import cases
from tests.kernels.parts import has_parts, parts_of, pick

# bfloat16 is what models run in: it comes first wherever time may end.
DTYPES = ("bfloat16", "float32", "float16")
ROUNDING = "rounding"


def dtypes_of(name: str) -> tuple[str, ...]:
    """Those worth running: an operator on bytes has only one kind of call."""
    return DTYPES if any(tensor.dtype == FLOAT for tensor in registry.operator(name).tensors) else DTYPES[:1]


def triton_operators() -> tuple[str, ...]:
    """Operators that have a Triton backend, whether or not it would serve here."""
    return tuple(one.name for one in registry.operators() if "triton" in registry.backends(one.name))


def check_rounding(name: str) -> None:
    """One helper that rounds or decodes in device code, over all codes."""
    from tests.kernels.triton_proofs import PROOFS

    if not PROOFS[name]("cuda"):
        raise Mismatch(f"{name}: a code comes out wrong")


def check_case(name: str, case_name: str, dtype_name: str) -> str | None:
    """Why the backend refuses the case, or None after it was right; an exception where it was not.

    Uninitialised memory is NaN (integers their largest value), so that what is never written is seen.
    """
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    # A call without a row launches nothing.
    warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
    torch.use_deterministic_algorithms(True, warn_only=True)
    operator, dtype = registry.operator(name), getattr(torch, dtype_name)
    case = next(one for one in cases(name) if one.name == case_name)
    try:
        ours = registry.resolve(name, "cuda", dtype, "triton", case.sizes).fn
    except registry.BackendRefused as refused:
        return refused.reason
    reference = registry.resolve(name, "cuda", dtype, "reference").fn
    with torch.no_grad():
        for seed in (0, 1):
            inputs = make_inputs(operator, case, seed=seed, device="cuda", dtype=dtype)
            judge_backend(operator, ours, reference, inputs)
            if seed == 0:
                check_in_graph(operator, ours, inputs)
            else:
                check_neighbours(operator, ours, inputs, case)
    return None


def check_in_graph(operator: Operator, fn: Callable[..., Any], inputs: Inputs) -> None:
    """The replay of a captured call gives the bits of a plain one."""
    plain = run(operator, fn, inputs)
    mine = inputs.copy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = fn(**mine.tensors, **mine.scalars)
    for tensor in operator.cached:
        mine.tensors[tensor.name].copy_(inputs.tensors[tensor.name])
    graph.replay()
    torch.cuda.synchronize()
    results = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    replayed = {spec.name: result for spec, result in zip(operator.outputs, results, strict=True)}
    replayed |= {tensor.name: mine.tensors[tensor.name] for tensor in operator.cached}
    for key, result in replayed.items():
        if not same_bits(result, plain[key]):
            raise Mismatch(f"{key} has other bits when its graph is replayed")
    graph.reset()


def check_neighbours(operator: Operator, fn: Callable[..., Any], inputs: Inputs, case: Case) -> None:
    """The last row or sequence alone, and then the others backwards, have the bits they have together."""
    count = parts_of(operator, case) if has_parts(operator) else 0
    if count < 2:
        return
    whole = run(operator, fn, inputs)
    caches = {tensor.name: inputs.tensors[tensor.name] for tensor in operator.cached}
    for group in ([count - 1], list(range(count - 1))[::-1]):
        picked, rows = pick(operator, inputs, group)
        results = run(operator, fn, Inputs({**picked.tensors, **caches}, picked.scalars))
        caches = {name: results[name] for name in caches}
        for spec in operator.outputs:
            if not same_bits(results[spec.name], whole[spec.name][rows]):
                raise Mismatch(f"{spec.name} of {len(group)} of {count} parts has other bits than among all")
    for name, cache in caches.items():
        if not same_bits(cache, whole[name]):
            raise Mismatch(f"{name} has other bits after its parts than after all at once")
