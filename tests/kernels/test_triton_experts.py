"""FP8 experts and what surrounds them in Triton without a GPU: right interpreted, and fit for a Hopper as compiled."""

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
from day0_kernels.expert_routing.triton import permute_rows, select_experts, unpermute_rows
from day0_kernels.fp8_expert_gemm.triton import fp8_expert_gemm
from day0_kernels.fp8_expert_product.triton import fp8_expert_product
from day0_kernels.swiglu.triton import swiglu, swiglu_fp8
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import Machine, compiled, recorded

CHECKS = (
    "case:select_experts:glm:float32",
    "case:select_experts:one_expert:float32",
    "case:select_experts:grouped:float32",
    "case:select_experts:odd_groups:float32",
    "case:select_experts:groups_too_small:float32",
    "case:select_experts:softmax:float32",
    "case:select_experts:sqrt_softplus:float32",
    "case:select_experts:not_normalised:float32",
    "case:select_experts:no_token:float32",
    "ties",
    "not_a_number",
    "extremes",
    "case:permute_rows:chunk_plus_1:bfloat16",
    "case:permute_rows:many_chunks:float32",
    "case:permute_rows:many_bins:float32",
    "case:permute_rows:odd_width:float16",
    "case:permute_rows:no_token:bfloat16",
    "case:unpermute_rows:several:bfloat16",
    "case:unpermute_rows:odd_width:float16",
    "case:unpermute_rows:wide:float32",
    "rows_at_places",
    "case:swiglu:clamped:bfloat16",
    "case:swiglu:gpt_oss:float16",
    "case:swiglu:unclamped:float32",
    "case:swiglu:odd_width:bfloat16",
    "case:swiglu:wide:bfloat16",
    "case:swiglu_fp8:several:bfloat16",
    "case:swiglu_fp8:gpt_oss:float32",
    "case:swiglu_fp8:wide:float16",
    "quantised:none",
    "quantised:0.5",
    "gate_not_a_number",
    "case:fp8_expert_product:expert_without_token:float32",
    "case:fp8_expert_product:no_token:float32",
    "case:fp8_expert_product:many:float32",
    "case:fp8_expert_product:both_edges:float32",
    "case:fp8_expert_product:deep:float32",
    "case:fp8_expert_product:large_tiles:float32",
    "case:fp8_expert_product:middle_tiles:float32",
    "neighbours:fp8_expert_product:large_tiles",
    "product_not_a_number:fp8_expert_product",
    "case:fp8_expert_gemm:expert_without_token:bfloat16",
    "case:fp8_expert_gemm:no_token:bfloat16",
    "case:fp8_expert_gemm:column_edges:bfloat16",
    "case:fp8_expert_gemm:deep_blocks:bfloat16",
    "case:fp8_expert_gemm:middle_tiles:bfloat16",
    "neighbours:fp8_expert_gemm:column_edges",
    "product_not_a_number:fp8_expert_gemm",
    "terms",
    "outlier",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_expert_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


FOLDER = Path(day0_kernels.__file__).parent
BF16, INT, BYTE, FLOAT = torch.bfloat16, torch.int32, torch.uint8, torch.float32


def _on_no_device(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _sizes(folder: str) -> list[int]:
    """One number of rows an expert for each committed configuration of a product."""
    entries = json.loads((FOLDER / folder / "sm_90.json").read_text())["product"]
    bounds = [entry["up_to"] for entry in entries]
    assert bounds[-1] is None and bounds[:-1] == sorted(bounds[:-1])
    return [*bounds[:-1], (bounds[-2] if len(bounds) > 1 else 0) + 1]


def _product(rows_an_expert: int, depth: int) -> Callable[[], Any]:
    make, rows = _on_no_device, 288 * rows_an_expert
    return lambda: fp8_expert_product(
        make(rows, depth, dtype=BYTE),
        make(rows, depth // 128, dtype=FLOAT),
        make(288, 4096, depth, dtype=BYTE),
        make(288, 32, depth // 128, dtype=FLOAT),
        make(289, dtype=INT),
    )


def _widened(rows_an_expert: int) -> Callable[[], Any]:
    make = _on_no_device
    return lambda: fp8_expert_gemm(
        make(288 * rows_an_expert, 4096),
        make(288, 4096, 4096, dtype=BYTE),
        make(288, 32, 32, dtype=FLOAT),
        make(289, dtype=INT),
    )


def _select(experts: int, groups: int, top_k: int) -> Callable[[], Any]:
    return lambda: select_experts(
        _on_no_device(4096, experts, dtype=FLOAT),
        _on_no_device(experts, dtype=FLOAT),
        score="sigmoid",
        top_k=top_k,
        groups=groups,
        topk_groups=max(1, groups // 2),
        normalise=True,
        scaling=2.5,
    )


_GATE = {"limit": 10.0, "alpha": 1.0, "up_offset": 0.0}
CALLS: dict[str, Callable[[], Any]] = {
    **{
        f"fp8_expert_product-{n}-{depth}": _product(n, depth)
        for n in _sizes("fp8_expert_product")
        for depth in (2048, 4096)
    },
    **{f"fp8_expert_gemm-{n}": _widened(n) for n in _sizes("fp8_expert_gemm")},
    "select_experts-288": _select(288, 1, 8),
    "select_experts-256-grouped": _select(256, 8, 8),
    "permute_rows": lambda: permute_rows(_on_no_device(4096, 4096), _on_no_device(4096, 8, dtype=INT), experts=288),
    "unpermute_rows": lambda: unpermute_rows(
        _on_no_device(32768, 4096), _on_no_device(4096, 8, dtype=FLOAT), _on_no_device(4096, 8, dtype=INT)
    ),
    "swiglu": lambda: swiglu(_on_no_device(32768, 4096), **_GATE),
    "swiglu_fp8": lambda: swiglu_fp8(_on_no_device(32768, 4096), **_GATE),
}
# Registers a thread. Two halves of 128 x 128 float32 sums and the unscaled ones fill a multiprocessor's file alone.
MOST_REGISTERS = {
    "many_rows_kernel": 255,
    "few_rows_kernel": 144,
    "select_kernel": 128,
    "count_kernel": 128,
    "place_kernel": 128,
}
MOST_REGISTERS_OTHERWISE = 80
LARGEST_SHARED_BYTES = 227 * 1024


def _machines(call: str) -> list[Machine]:
    launches = recorded(CALLS[call])
    assert launches
    return [compiled(launch) for launch in launches]


@pytest.mark.parametrize("call", CALLS)
def test_fits_the_machine(call: str) -> None:
    for machine in _machines(call):
        assert machine.local_bytes == 0, machine.kernel
        assert machine.shared_bytes <= LARGEST_SHARED_BYTES, machine.shared_bytes
        assert machine.registers <= MOST_REGISTERS.get(machine.kernel, MOST_REGISTERS_OTHERWISE), machine
        if machine.kernel.endswith("_rows_kernel"):
            # e4m3 by e4m3 on the tensor cores, and weights brought by the copy engine.
            products = [line for line in machine.ptx.splitlines() if "wgmma.mma_async" in line]
            assert products and all(".e4m3.e4m3" in line for line in products)
            assert "mma.sync" not in machine.ptx
            assert "cp.async.bulk.tensor" in machine.ptx


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its values need."""
    launch = recorded(CALLS["fp8_expert_product-124-4096"])[-1]
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 128})).local_bytes > 0
