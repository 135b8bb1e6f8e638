"""Runs Triton backends under Triton's interpreter on CPU tensors and prints a line of JSON for each check.

A process of its own, because Triton decides when it is imported whether it interprets:
`TRITON_INTERPRET=1 python -m tests.kernels.triton_interpreted`, with a check a line on standard input:
`operator:case:dtype`, `neighbours:operator:case`, `proof:name`, `nan:operator`,
`outlier`, `extreme_scales` or `bfloat16_weight`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from day0_kernels import registry
from day0_kernels.comparison import judge_backend, run, same_bits
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import Case, Fill
from tests.kernels.triton_proofs import PROOFS

ID_FILLS = (Fill.SLOT_MAPPING, Fill.BLOCK_TABLE, Fill.STATE_SLOTS, Fill.TOPK_INDICES)

# Cases that a GPU has in every model and the specs' small ones do not.
MORE_CASES = {
    "mxfp4_expert_gemm": (
        Case("whole_blocks", {"Din": 256, "Dout": 130}, expert_rows=(1, 0, 17)),
        Case("more_than_a_pass", {"Din": 8224, "Dout": 3}, expert_rows=(1, 0)),
        Case("full_tiles", {"Din": 32, "Dout": 8}, expert_rows=(16, 0, 32)),
    ),
    "index_pool": (
        # Parts of 64 tokens whose bounds are inside a pool, between pools, and in the tail.
        Case(
            "longer_than_a_part",
            {"D": 5, "P": 4, "states": 5, "num_blocks": 24, "block_size": 16},
            (66, 1, 64, 129),
            (3, 2, 0, 5),
            {"block_size": 16},
        ),
        Case(
            "pool_of_3",
            {"D": 16, "P": 3, "states": 4, "num_blocks": 24, "block_size": 12},
            (70, 2, 4),
            (1, 1, 35),
            {"block_size": 12},
        ),
    ),
    "hc_pre": (
        Case("many_parts", {"M": 4, "D": 300}, (3,), (0,), {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 20}),
    ),
}


def function(name: str, backend: str) -> Callable[..., Any]:
    """A backend's function, whatever it would say about the device."""
    folder = registry._folders()[name]
    found: Callable[..., Any] = getattr(importlib.import_module(f"day0_kernels.{folder}.{backend}"), name)
    return found


def case_of(name: str, case: str) -> Case:
    return next(one for one in (*registry.operator(name).cases, *MORE_CASES.get(name, ())) if one.name == case)


def check_case(name: str, case: str, dtype: str) -> None:
    """Right within the spec's tolerance, and the same bits twice; ids at both edges where there are ids."""
    operator = registry.operator(name)
    for seed in (0, 1) if any(tensor.ids for tensor in operator.tensors if tensor.fill in ID_FILLS) else (0,):
        inputs = make_inputs(operator, case_of(name, case), seed=seed, dtype=getattr(torch, dtype))
        judge_backend(operator, function(name, "triton"), function(name, "reference"), inputs)


def check_neighbours(name: str, case: str) -> None:
    """The first row alone has the bits it has among the others."""
    operator, fn = registry.operator(name), function(name, "triton")
    inputs = make_inputs(operator, case_of(name, case), dtype=torch.bfloat16)
    whole = run(operator, fn, inputs)
    alone = {
        tensor.name: inputs.tensors[tensor.name][:1] if tensor.shape[0] in ("T", "N") else inputs.tensors[tensor.name]
        for tensor in operator.tensors
    }
    if "expert_offsets" in alone:
        alone["expert_offsets"] = inputs.tensors["expert_offsets"].clamp(max=1)
    for key, result in run(operator, fn, Inputs(alone, inputs.scalars)).items():
        assert same_bits(result, whole[key][:1]), f"{key} of the first row alone has other bits"


def check_nan(name: str) -> None:
    """A scale byte 255 is seen where it stands and nowhere else."""
    fn = function(name, "triton")
    codes, scales = torch.zeros(2, 130, 32, dtype=torch.uint8), torch.full((2, 130, 2), 120, dtype=torch.uint8)
    codes[1, 129, 3], scales[1, 129, 0] = 2, 255
    scales[0, 0, 1] = 255
    if name == "mxfp4_to_fp8":
        fp8 = torch.empty(2, 130, 64, dtype=torch.uint8)
        _, spans = fn(codes, scales, fp8)
        assert spans.flatten().tolist() == [255, 0, 0, 255], spans
        found = fp8.view(torch.float8_e4m3fn).float().isnan()
        assert found[0, :128].all() and found[1, 128:].all() and int(found.sum()) == 130 * 64
    else:
        out = fn(torch.ones(2, 64, dtype=torch.bfloat16), codes, scales, torch.tensor([0, 1, 2], dtype=torch.int32))
        assert out.isnan().nonzero().tolist() == [[0, 0], [1, 129]], out.isnan().nonzero()


def check_outlier() -> None:
    """Beside one column 2^14 times larger, the others keep 17 bits below it; what they are alone, they are exactly."""
    fn = function("mxfp4_expert_gemm", "triton")
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[1:, 5] = 2.0**14
    codes = torch.full((1, 2, 64), 0x22, dtype=torch.uint8)
    codes[0, 0, 2] = 0x02
    scales, offsets = torch.full((1, 2, 4), 127, dtype=torch.uint8), torch.tensor([0, 3], dtype=torch.int32)
    got, want = (f(x, codes, scales, offsets).double() for f in (fn, function("mxfp4_expert_gemm", "reference")))
    # Row 0 of the weight leaves the large column out.
    assert torch.equal(got[0], want[0])
    assert ((got - want)[1:, 0].abs() <= 2.0**14 * 2**-17 * 128).all(), (got - want)[:, 0]
    assert torch.equal(got[1:, 1], want[1:, 1])


def check_extreme_scales() -> None:
    """The smallest scale byte is 2^-127 and not 0, and no sum up to the byte 236 is infinite."""
    fn, reference = (function("mxfp4_expert_gemm", backend) for backend in ("triton", "reference"))
    codes, offsets = torch.full((1, 1, 64), 0x72, dtype=torch.uint8), torch.tensor([0, 1], dtype=torch.int32)
    for byte, magnitude in ((0, 2.0**100), (1, 2.0**100), (236, 2.0**-100)):
        x = torch.full((1, 128), magnitude, dtype=torch.bfloat16)
        scales = torch.full((1, 1, 4), byte, dtype=torch.uint8)
        got, want = fn(x, codes, scales, offsets), reference(x, codes, scales, offsets)
        assert float(want) > 0 and torch.equal(got, want), (byte, got, want)


def check_bfloat16_weight() -> None:
    """A mixing weight in bfloat16, as models of bfloat16 have it, counts exactly as it is."""
    operator = registry.operator("hc_pre")
    made = make_inputs(operator, case_of("hc_pre", "four_streams"), dtype=torch.bfloat16)
    narrow = made.tensors["fn"].bfloat16()
    inputs = Inputs({**made.tensors, "fn": narrow}, made.scalars)
    judge_backend(operator, function("hc_pre", "triton"), function("hc_pre", "reference"), inputs)
    widened = Inputs({**made.tensors, "fn": narrow.float()}, made.scalars)
    found, expected = (run(operator, function("hc_pre", "triton"), each) for each in (inputs, widened))
    for key, value in found.items():
        torch.testing.assert_close(value.float(), expected[key].float(), rtol=1e-2, atol=1e-4)


def check(line: str) -> None:
    kind, *rest = line.split(":")
    if kind == "proof":
        assert PROOFS[rest[0]]("cpu"), "a code came out wrong"
    elif kind == "neighbours":
        check_neighbours(*rest)
    elif kind == "nan":
        check_nan(*rest)
    elif kind == "extreme_scales":
        check_extreme_scales()
    elif kind == "bfloat16_weight":
        check_bfloat16_weight()
    elif kind == "outlier":
        check_outlier()
    else:
        check_case(kind, *rest)


def main() -> None:
    torch.set_num_threads(1)
    # Uninitialised memory is NaN: what is never written is seen.
    torch.use_deterministic_algorithms(True)
    for line in sys.stdin.read().split():
        began = time.perf_counter()
        wrong = None
        try:
            with torch.no_grad():
                check(line)
        except Exception as error:  # the parent shows it as that check's failure
            wrong = f"{type(error).__name__}: {error}"
        print(json.dumps({"id": line, "wrong": wrong, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
