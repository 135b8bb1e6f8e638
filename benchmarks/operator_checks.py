"""Whether every operator's Triton backend is right on this GPU: all cases, poisoned memory, twice, in a graph."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from day0_kernels import registry
from day0_kernels.comparison import Mismatch, judge_backend, run, same_bits
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import FLOAT, Case, Operator

DTYPES = ("float32", "bfloat16", "float16")
TIMED_DTYPE = "bfloat16"
WORKERS = 8
ROW_BY_ROW = ("hc_pre", "hc_post", "mxfp4_expert_gemm")
# The specs' cases are small; these have whole tiles and more parts than one.
MORE_CASES = {
    "mxfp4_expert_gemm": (
        Case("whole_blocks", {"Din": 256, "Dout": 130}, expert_rows=(1, 0, 17)),
        Case("wide_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(40, 0, 15, 129)),
        Case("middle_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(0, 17, 20, 33)),
    ),
    "hc_pre": (
        Case(
            "many_parts",
            {"M": 4, "D": 4096},
            (70,),
            (0,),
            {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 20},
        ),
    ),
    "hc_post": (Case("wide", {"M": 4, "D": 4096}, (70,), (0,)),),
    "mxfp4_to_fp8": (Case("blocks", {"E": 3, "N": 512, "K": 1024}),),
}


def cases(operator: Operator) -> tuple[Case, ...]:
    return (*operator.cases, *MORE_CASES.get(operator.name, ()))


def check_operator(job: tuple[str, str, float]) -> tuple[str, str, int, int, list[str]]:
    """Operator, dtype, cases run, cases not reached in the seconds given, and what was wrong.

    No case runs where the backend refuses the dtype.
    """
    name, dtype_name, seconds = job
    began = time.monotonic()
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    # Uninitialised memory is NaN: what is never written is seen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    operator, dtype = registry.operator(name), getattr(torch, dtype_name)
    try:
        ours = registry.resolve(name, "cuda", dtype, "triton").fn
    except registry.BackendRefused as refused:
        return name, dtype_name, 0, 0, [] if refused.reason.startswith("dtype") else [refused.reason]
    reference = registry.resolve(name, "cuda", dtype, "reference").fn
    wrong: list[str] = []
    ran = missed = 0
    for case in cases(operator):
        for seed in (0, 1):
            if time.monotonic() - began > seconds:
                missed += 1
                continue
            ran += 1
            try:
                with torch.no_grad():
                    inputs = make_inputs(operator, case, seed=seed, device="cuda", dtype=dtype)
                    judge_backend(operator, ours, reference, inputs)
                    if seed == 0:
                        check_in_graph(operator, ours, inputs)
                    if name in ROW_BY_ROW and len(next(iter(inputs.tensors.values()))):
                        check_first_row(operator, ours, inputs)
            except Exception as error:  # one wrong case must not hide the others
                wrong.append(f"{case.name} {dtype_name} seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    return name, dtype_name, ran, missed, wrong


def check_first_row(operator: Operator, fn: Callable[..., Any], inputs: Inputs) -> None:
    """The first row alone, which may run in other tiles, has the bits it has among the others."""
    alone = {
        tensor.name: inputs.tensors[tensor.name][:1] if tensor.shape[0] in ("T", "N") else inputs.tensors[tensor.name]
        for tensor in operator.tensors
    }
    if "expert_offsets" in alone:
        alone["expert_offsets"] = inputs.tensors["expert_offsets"].clamp(max=1)
    whole = run(operator, fn, inputs)
    for key, result in run(operator, fn, Inputs(alone, inputs.scalars)).items():
        if not same_bits(result, whole[key][:1]):
            raise Mismatch(f"{key} of the first row has other bits alone")


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


def check_all(only: set[str], seconds: float, seconds_each: float) -> dict[str, list[str]]:
    """What is wrong with each operator that has a Triton backend; a line for each dtype as soon as it is done.

    Few cases first. A dtype begins no case after `seconds_each`; what is not done after `seconds` is stopped, and an
    operator of which no dtype was done counts as wrong. In processes, because nearly all of the time is the compiler's,
    and because a wrong access ends all work of one.
    """
    from tests.kernels.triton_proofs import PROOFS

    began = time.monotonic()
    found: dict[str, list[str]] = {"rounding": [name for name, proof in PROOFS.items() if not proof("cuda")]}
    said = "WRONG " + str(found["rounding"]) if found["rounding"] else "right"
    print("rounding and decoding over all codes:", said, flush=True)
    declared = [
        operator
        for operator in registry.operators()
        if "triton" in registry.backends(operator.name) and (not only or operator.name in only)
    ]
    declared.sort(key=lambda operator: len(cases(operator)))
    # The dtype that is timed comes first of all operators.
    jobs = [
        (operator.name, dtype, seconds_each)
        for first in (True, False)
        for operator in declared
        for dtype in _dtypes(operator.name)
        if (dtype == TIMED_DTYPE or len(_dtypes(operator.name)) == 1) == first
    ]
    waiting = {(name, dtype) for name, dtype, _ in jobs}
    done: set[str] = set()
    # A pool that ends its processes when it is left, whatever they do.
    with multiprocessing.get_context("spawn").Pool(WORKERS, maxtasksperchild=1) as pool:
        results = pool.imap_unordered(check_operator, jobs)
        while waiting:
            try:
                name, dtype, ran, missed, wrong = results.next(max(0.1, seconds - (time.monotonic() - began)))
            except multiprocessing.TimeoutError:
                break
            waiting.discard((name, dtype))
            done.add(name)
            found.setdefault(name, []).extend(wrong)
            late = f", {missed} not reached" if missed else ""
            print(f"{name:<22}{dtype:<10}{ran:>4} cases, {len(wrong)} wrong{late}", flush=True)
            for line in wrong[:4]:
                print("    " + line, flush=True)
    for name, dtype in sorted(waiting):
        print(f"{name:<22}{dtype:<10}not done after {seconds:.0f} s", flush=True)
    for operator in declared:
        if operator.name not in done:
            found[operator.name] = [f"not checked within {seconds:.0f} s"]
    return found


def _dtypes(name: str) -> tuple[str, ...]:
    """Those worth running: an operator on bytes has only one kind of call."""
    return DTYPES if any(tensor.dtype == FLOAT for tensor in registry.operator(name).tensors) else DTYPES[:1]
