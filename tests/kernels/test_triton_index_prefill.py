"""Index selection's prefill in Triton without a GPU: right interpreted, and fit for a Hopper as compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from day0_kernels.fp8_index_select.triton import fp8_index_select_prefill
from day0_kernels.index_select.triton import index_select_prefill
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import Machine, compiled, recorded

CHECKS = (
    "case:index_select_prefill:one:bfloat16",
    "case:index_select_prefill:topk_plus_1:bfloat16",
    "case:index_select_prefill:packed:float16",
    "case:index_select_prefill:empty_sequence:float32",
    "case:index_select_prefill:no_token:bfloat16",
    "case:index_select_prefill:without_tail:bfloat16",
    "case:index_select_prefill:block_of_a_tile:bfloat16",
    "case:index_select_prefill:tile_of_blocks:float16",
    "case:fp8_index_select_prefill:empty_sequence:float32",
    "case:fp8_index_select_prefill:topk_not_of_pools:float32",
    "case:fp8_index_select_prefill:topk_above_context:float32",
    "case:fp8_index_select_prefill:block_of_a_tile:float32",
    "case:fp8_index_select_prefill:tile_of_blocks:float32",
    "broken:index_select_prefill",
    "broken:fp8_index_select_prefill",
    "steps:index_select_prefill:continued",
    "neighbours:index_select_prefill:tile_of_blocks",
    "neighbours:fp8_index_select_prefill:block_of_a_tile",
    "choice:normal",
    "choice:zeros",
    "choice:broken",
    "choice:sample_too_high",
    "choice:sample_too_low",
    "choice:close",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_index_prefill_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


def _on_no_device(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _call(dtype: torch.dtype, heads: int, pool: int) -> Callable[[], Any]:
    """4,096 tokens of sequences of 64k; `torch.uint8` for FP8 queries and keys."""
    fp8 = dtype == torch.uint8
    make, per_block = _on_no_device, 64 // pool
    cache = make(1000, per_block * 132, dtype=dtype) if fp8 else make(1000 * per_block, 128, dtype=dtype)
    scalars: dict[str, Any] = {"pool_size": pool, "topk_tokens": 2048, "block_size": 64, "always_tail": pool > 1}
    fn: Callable[..., Any] = fp8_index_select_prefill if fp8 else index_select_prefill
    return lambda: fn(
        make(4096, heads, 128, dtype=dtype),
        make(4096, heads, dtype=torch.float32 if fp8 else dtype),
        cache,
        make(2, 1024),
        make(3),
        make(2),
        **scalars,
        **({} if fp8 else {"softmax_scale": 0.1}),
    )


CALLS: dict[str, Callable[[], Any]] = {
    "fp8-32-1": _call(torch.uint8, 32, 1),
    "fp8-64-1": _call(torch.uint8, 64, 1),
    "fp8-32-16": _call(torch.uint8, 32, 16),
    "bf16-32-1": _call(torch.bfloat16, 32, 1),
    "bf16-32-16": _call(torch.bfloat16, 32, 16),
}
LARGEST_SHARED_BYTES = 227 * 1024
REGISTERS = 65536


def _machines(call: str) -> list[tuple[Machine, int]]:
    """Both kernels with their threads; every step of a call launches the same two."""
    scores, choice, *_ = recorded(CALLS[call])
    return [(compiled(launch), 32 * launch.options["num_warps"]) for launch in (scores, choice)]


@pytest.mark.parametrize("call", CALLS)
def test_fits_the_machine(call: str) -> None:
    (scores, threads), (choice, choice_threads) = _machines(call)
    assert (scores.kernel, choice.kernel) == ("score_queries", "choose_queries")
    assert scores.local_bytes == choice.local_bytes == 0
    # Two programs at once: the products of one hide what the other does with its sums. Choosing waits for memory.
    assert 2 * scores.registers * threads <= REGISTERS, scores.registers
    assert 2 * scores.shared_bytes <= LARGEST_SHARED_BYTES, scores.shared_bytes
    assert 3 * choice.registers * choice_threads <= REGISTERS, choice.registers
    products = [line for line in scores.ptx.splitlines() if "mma" in line and ".sync.aligned.m" in line]
    kind = "m64n{}k32.f32.e4m3.e4m3" if call.startswith("fp8") else "m64n{}k16.f32.bf16.bf16"
    assert products and all(any(kind.format(n) in line for n in (128, 256)) for line in products)
    # Whole rows of memory, and no exchange between threads for the sum over heads.
    assert "cp.async.cg" in scores.ptx and "ld.global.v2.b64" in choice.ptx
    assert "stmatrix" in scores.ptx


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its sums need."""
    launch = recorded(CALLS["fp8-32-1"])[0]
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 96})).local_bytes > 0
