"""Checks of FP8 rows and of their product with MXFP4 weights under Triton's interpreter, a line of JSON for each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_mxfp4_checks`), because Triton decides when it
is imported whether it interprets. `test_triton_mxfp4.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from day0_kernels import registry
from day0_kernels.comparison import judge_backend, run, same_bits
from day0_kernels.fp8_quantise.reference import to_mxfp4_order
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import Case
from tests.kernels.check_process import answer_checks
from tests.kernels.parts import parts_of, pick

CASES = {
    "wide_row": Case("wide_row", {"N": 2, "Din": 8320, "G": 1}, scalars={"group": 8320, "mxfp4_order": True}),
    "wide_groups": Case("wide_groups", {"N": 2, "Din": 4224, "G": 33}, scalars={"group": 128, "mxfp4_order": False}),
}


def function(name: str, backend: str) -> Callable[..., Any]:
    """A backend's function, whatever it would say about the device."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"day0_kernels.{name}.{backend}"), name)
    return found


def _case(name: str, case: str) -> Case:
    return CASES.get(case) or next(one for one in registry.operator(name).cases if one.name == case)


def check_case(name: str, case: str, dtype: str) -> None:
    """Right within the spec's tolerance, and the same bits twice."""
    inputs = make_inputs(registry.operator(name), _case(name, case), dtype=getattr(torch, dtype))
    judge_backend(registry.operator(name), function(name, "triton"), function(name, "reference"), inputs)


def check_neighbours(name: str, case: str) -> None:
    """The last row alone has the bits it has among the others."""
    operator, found = registry.operator(name), _case(name, case)
    inputs = make_inputs(operator, found, seed=3)
    whole = run(operator, function(name, "triton"), inputs)
    alone, rows = pick(operator, inputs, [parts_of(operator, found) - 1])
    for key, result in run(operator, function(name, "triton"), Inputs(alone.tensors, inputs.scalars)).items():
        assert same_bits(result, whole[key][rows]), key


def check_not_finite() -> None:
    """A NaN or an infinity is NaN and takes the rest of its group to zero; a group of zeros has the smallest scale."""
    x = torch.ones(4, 256)
    x[0, 3], x[1, 200], x[2, 130] = torch.nan, torch.inf, -torch.inf
    x[3, :128] = 0
    for backend in ("triton", "reference"):
        q, scales = function("fp8_quantise", backend)(x, group=128, mxfp4_order=False)
        values = q.view(torch.float8_e4m3fn).float()
        assert values.isnan().nonzero().tolist() == [[0, 3], [1, 200], [2, 130]], backend
        assert (values * scales.repeat_interleave(128, 1))[0, 128:].tolist() == [1.0] * 128
        assert values[0, :3].tolist() == [0.0] * 3 and float(scales[3, 0]) == 2.0**-126


def check_every_scale() -> None:
    """Each scale byte by itself, 0 and 255 among them, with every code."""
    codes = torch.arange(64).repeat(1, 256, 1).mul(4).to(torch.uint8)
    scales = torch.arange(256).repeat_interleave(4).view(1, 256, 4).to(torch.uint8)
    tops = torch.full((1, 256), 255, dtype=torch.uint8)
    # One column a row, so that every product is exact; once the scale goes down from it, once up.
    x = torch.zeros(256, 128, dtype=torch.uint8)
    x[torch.arange(256), torch.arange(256) % 128] = 8
    x_scales = torch.full((256, 1), 2.0**-54)
    x_scales[128:] = 2.0**90
    offsets = torch.tensor([0, 256], dtype=torch.int32)
    arguments = (x, x_scales, codes, scales, tops, offsets)
    backends = [function("mxfp4_fp8_expert_gemm", backend) for backend in ("triton", "reference")]
    got, want = (fn(*arguments, by_group=True) for fn in backends)
    assert got[:, 255].isnan().all() and want[:, 255].isnan().any()
    # What float32 cannot hold in between is NaN here and infinite there.
    for rows, bytes_ in ((slice(0, 128), slice(0, 252)), (slice(128, 256), slice(0, 128))):
        assert want[rows, bytes_].isfinite().all() and want[rows, bytes_].any()
        assert torch.equal(got[rows, bytes_], want[rows, bytes_]), (got != want)[rows, bytes_].nonzero()[:4]


def check_reordered() -> None:
    """Rows for the product by groups: from the order they have to groups behind each other, even columns first."""
    from day0_kernels.mxfp4_fp8_expert_gemm._triton_kernels import reorder_kernel

    for columns in (128, 384, 2176):
        q = torch.randint(0, 256, (3, columns), generator=torch.Generator().manual_seed(columns)).to(torch.uint8)
        got = torch.zeros_like(q)
        reorder_kernel[(3,)](to_mxfp4_order(q), got, K=columns, BLOCK_K=2048)
        want = q.unflatten(1, (-1, 16, 2)).transpose(2, 3).flatten(1)
        assert torch.equal(got, want), columns


def check_refused() -> None:
    """Sizes these kernels cannot have are refused, or an error that names them."""
    from day0_kernels.mxfp4_fp8_expert_gemm.triton import refusal

    cpu, name = torch.device("cpu"), "mxfp4_fp8_expert_gemm"
    assert refusal(name, cpu, torch.bfloat16, {"Din": 96}) == "Din must be a multiple of 128, is 96"
    assert refusal(name, cpu, torch.bfloat16, {"E": 5000}) == "E must be at most 4096, is 5000"
    for backend in ("triton", "reference"):
        for group, ordered, reason in ((64, False, "group must be 128 or all 96"), (96, True, "multiple of 128")):
            try:
                function("fp8_quantise", backend)(torch.ones(1, 96), group=group, mxfp4_order=ordered)
            except ValueError as error:
                assert reason in str(error), error
            else:
                raise AssertionError(f"{backend}: {reason} is not said")


KINDS: dict[str, Callable[..., None]] = {
    "case": check_case,
    "neighbours": check_neighbours,
    "not_finite": check_not_finite,
    "every_scale": check_every_scale,
    "reordered": check_reordered,
    "refused": check_refused,
}


if __name__ == "__main__":
    answer_checks(KINDS)
