"""Index selection at decode in Triton without a GPU: right interpreted, and fit for a Hopper as compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from day0_kernels.fp8_index_select.triton import fp8_index_select_decode
from day0_kernels.index_select.triton import index_select_decode
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import Machine, compiled, recorded

FLOAT, FP8 = "index_select_decode", "fp8_index_select_decode"
CHECKS = (
    f"case:{FLOAT}:pool_edges:bfloat16:flat",
    f"case:{FLOAT}:topk_plus_1:bfloat16:few",
    f"case:{FLOAT}:batch:bfloat16:few",
    f"case:{FLOAT}:padding_rows:float16:many",
    f"case:{FLOAT}:only_padding:float32:flat",
    f"case:{FLOAT}:without_tail:bfloat16:flat",
    f"case:{FLOAT}:topk_above_context:bfloat16:flat",
    f"case:{FLOAT}:one_head:float32:many",
    f"case:{FP8}:block_edges:bfloat16:flat",
    f"case:{FP8}:batch:bfloat16:many",
    f"case:{FP8}:padding_rows:bfloat16:flat",
    f"case:{FP8}:without_tail:bfloat16:few",
    f"case:{FP8}:pool_of_1:bfloat16:few",
    f"case:{FP8}:one_head:bfloat16:flat",
    "whole_blocks:without_tail",
    "whole_blocks:block_edges",
    f"neighbours:{FLOAT}:padding_rows",
    f"neighbours:{FP8}:batch",
    *(f"choice:{FLOAT}:{kind}:flat" for kind in ("zeros", "close", "broken")),
    *(f"choice:{FLOAT}:{kind}:few" for kind in ("zeros", "broken", "negative")),
    *(f"choice:{FLOAT}:{kind}:many" for kind in ("zeros", "close", "broken")),
    f"choice:{FP8}:close:few",
    f"choice:{FP8}:signed:flat",
    f"choice:{FP8}:broken:many",
    f"many:{FLOAT}:few:wide",
    f"many:{FP8}:rising:wide",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_index_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


def _on_no_device(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _call(rows: int, heads: int, pool: int, blocks: int, dtype: torch.dtype | None) -> Callable[[], Any]:
    """2,048 tokens of sequences of `blocks` blocks; FP8 keys where there is no dtype."""
    make, of_a_block = _on_no_device, 64 // pool
    scalars: dict[str, Any] = {"pool_size": pool, "topk_tokens": 2048, "block_size": 64, "always_tail": pool > 1}
    ids = (make(rows, blocks), make(rows))
    if dtype is None:
        queries = (make(rows, heads, 128, dtype=torch.uint8), make(rows, heads, dtype=torch.float32))
        keys = make(4000, of_a_block * 132, dtype=torch.uint8)
        return lambda: fp8_index_select_decode(*queries, keys, *ids, **scalars)
    queries = (make(rows, heads, 128, dtype=dtype), make(rows, heads, dtype=dtype))
    keys = make(4000 * of_a_block, 128, dtype=dtype)
    return lambda: index_select_decode(*queries, keys, *ids, softmax_scale=0.1, **scalars)


CALLS: dict[str, Callable[[], Any]] = {
    "bfloat16-8-pool-16": _call(8, 32, 16, 2048, torch.bfloat16),
    "bfloat16-9": _call(9, 64, 1, 2048, torch.bfloat16),
    "float32": _call(9, 32, 1, 2048, torch.float32),
    "fp8-8": _call(8, 32, 1, 2048, None),
    "fp8-9": _call(9, 64, 1, 2048, None),
    "fp8-pool-16": _call(9, 32, 16, 2048, None),
    "fp8-a-million": _call(9, 32, 1, 16384, None),
    "fp8-short": _call(9, 32, 16, 256, None),
}
# Registers a thread: room for the programs a multiprocessor must hold at once to hide its memory; a choice is alone.
MOST_REGISTERS = {"score_pools": 160, "score_fp8_pools": 160, "score_whole_blocks": 96, "gather": 192, "choose": 128}
LARGEST_SHARED_BYTES = 227 * 1024


def _machines(call: str) -> list[Machine]:
    launches = recorded(CALLS[call])
    assert launches
    return [compiled(launch) for launch in launches]


@pytest.mark.parametrize("call", CALLS)
def test_fits_the_machine(call: str) -> None:
    for machine in _machines(call):
        assert machine.local_bytes == 0, machine.kernel
        assert machine.registers <= MOST_REGISTERS[machine.kernel], machine
        assert machine.shared_bytes <= LARGEST_SHARED_BYTES, machine.shared_bytes
        products = [line for line in machine.ptx.splitlines() if "wgmma.mma_async" in line]
        if machine.kernel in ("score_fp8_pools", "score_whole_blocks"):
            assert products and all(".e4m3.e4m3" in line for line in products)
            assert "mma.sync" not in machine.ptx and "cp.async.cg" in machine.ptx
        if machine.kernel == "score_pools" and call != "float32":
            assert products
        if machine.kernel in ("gather", "choose"):
            assert "ld.global.v4" in machine.ptx


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its values need."""
    launch = recorded(CALLS["fp8-9"])[2]
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 40})).local_bytes > 0
