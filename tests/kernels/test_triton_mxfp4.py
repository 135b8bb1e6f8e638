"""FP8 rows and their product with MXFP4 weights without a GPU: right interpreted, and fit for a Hopper compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import day0_kernels
from day0_kernels.fp8_quantise.triton import fp8_quantise
from day0_kernels.mxfp4 import row_tops
from day0_kernels.mxfp4_fp8_expert_gemm.triton import mxfp4_fp8_expert_gemm
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import Machine, compiled, recorded

CHECKS = (
    "case:fp8_quantise:no_row:bfloat16",
    "case:fp8_quantise:row_scale:bfloat16",
    "case:fp8_quantise:odd_width:float16",
    "case:fp8_quantise:last_group_smaller:float32",
    "case:fp8_quantise:ordered:bfloat16",
    "case:fp8_quantise:ordered_groups:bfloat16",
    "case:fp8_quantise:wide_row:bfloat16",
    "case:fp8_quantise:wide_groups:bfloat16",
    "not_finite",
    "case:mxfp4_fp8_expert_gemm:expert_without_token:float32",
    "case:mxfp4_fp8_expert_gemm:no_token:float32",
    "case:mxfp4_fp8_expert_gemm:all_on_last:float32",
    "case:mxfp4_fp8_expert_gemm:many:float32",
    "case:mxfp4_fp8_expert_gemm:odd_block_count:float32",
    "case:mxfp4_fp8_expert_gemm:by_group:float32",
    "neighbours:mxfp4_fp8_expert_gemm:many",
    "reordered",
    "every_scale",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_mxfp4_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


def test_a_row_has_a_common_exponent_or_none() -> None:
    """Groups of zeros count nothing, eleven exponents below the largest are the most, and 255 is none."""
    codes = torch.full((1, 6, 64), 0x11, dtype=torch.uint8)
    scales = torch.tensor(
        [[120, 120, 120, 120], [120, 109, 115, 120], [120, 108, 115, 120], [0, 0, 0, 0], [9, 9, 255, 9], [7, 250, 7, 0]]
    )
    codes[0, 3], codes[0, 5, 16:32], codes[0, 5, 48:] = 0x80, 0x08, 0
    tops = row_tops(codes, scales.to(torch.uint8).unsqueeze(0))
    assert tops.tolist() == [[120, 120, 255, 0, 255, 7]]


FOLDER = Path(day0_kernels.__file__).parent
DEPTHS = (2048, 4096)


def _on_no_device(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _sizes(kernel: str) -> list[int]:
    """One number of rows an expert for each committed configuration of a kernel."""
    entries = json.loads((FOLDER / "mxfp4_fp8_expert_gemm" / "sm_90.json").read_text())[kernel]
    bounds = [entry["up_to"] for entry in entries]
    assert bounds[-1] is None and bounds[:-1] == sorted(bounds[:-1])
    return [*bounds[:-1], (bounds[-2] if len(bounds) > 1 else 0) + 1]


def _product(rows_an_expert: int, depth: int, by_group: bool) -> Callable[[], Any]:
    make, rows = _on_no_device, 288 * rows_an_expert
    return lambda: mxfp4_fp8_expert_gemm(
        make(rows, depth),
        make(rows, 1, dtype=torch.float32),
        make(288, 4096, depth // 2),
        make(288, 4096, depth // 32),
        make(288, 4096),
        make(289, dtype=torch.int32),
        by_group=by_group,
    )


def _quantise(columns: int, group: int, ordered: bool) -> Callable[[], Any]:
    rows = _on_no_device(4096, columns, dtype=torch.bfloat16)
    return lambda: fp8_quantise(rows, group=group, mxfp4_order=ordered)


CALLS: dict[str, Callable[[], Any]] = {
    **{f"common-{n}-{depth}": _product(n, depth, False) for n in _sizes("common") for depth in DEPTHS},
    **{f"by_group-{n}-{depth}": _product(n, depth, True) for n in _sizes("by_group") for depth in DEPTHS},
    **{f"fp8_quantise-{depth}-ordered": _quantise(depth, depth, True) for depth in DEPTHS},
    "fp8_quantise-4096-groups": _quantise(4096, 128, False),
}
HOPPER = {"common_kernel", "many_rows_kernel", "few_rows_kernel"}
# Registers a thread of the launch: with 168 of 12 warps, 8 may have 240 each.
MOST_REGISTERS = {"common_kernel": 96, "many_rows_kernel": 168, "few_rows_kernel": 104}
MOST_REGISTERS_OTHERWISE = 64
LARGEST_SHARED_BYTES = 227 * 1024


def _machines(call: str) -> list[Machine]:
    launches = recorded(CALLS[call])
    assert launches
    return [compiled(launch) for launch in launches]


@pytest.mark.parametrize("call", CALLS)
def test_fits_the_machine(call: str) -> None:
    machines = _machines(call)
    assert len(HOPPER & {machine.kernel for machine in machines}) == (not call.startswith("fp8_quantise"))
    for machine in machines:
        assert machine.local_bytes == 0, machine.kernel
        assert machine.shared_bytes <= LARGEST_SHARED_BYTES, machine.shared_bytes
        assert machine.registers <= MOST_REGISTERS.get(machine.kernel, MOST_REGISTERS_OTHERWISE), machine
        if machine.kernel in {"group_kernel", *HOPPER}:
            # e4m3 by e4m3 on the tensor cores.
            products = [line for line in machine.ptx.splitlines() if "wgmma.mma_async" in line]
            assert products and all(".e4m3.e4m3" in line for line in products)
            assert "mma.sync" not in machine.ptx
        if machine.kernel in HOPPER:
            # Whole lines of codes and rows, past the registers; decoded codes never go back to shared memory.
            assert ("cp.async.bulk.tensor" in machine.ptx) == (machine.kernel != "common_kernel")
            assert ("cp.async.cg.shared.global" in machine.ptx) == (machine.kernel == "common_kernel")
            assert "st.shared.b8" not in machine.ptx and "st.shared.b16" not in machine.ptx


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its values need."""
    (launch,) = (one for one in recorded(CALLS["common-10-4096"]) if one.kernel.__name__ == "common_kernel")
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 40})).local_bytes > 0
