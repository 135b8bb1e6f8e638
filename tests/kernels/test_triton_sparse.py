"""Sparse attention in Triton without a GPU: right interpreted, and fit for a Hopper as compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from day0_kernels.sparse_mla import _hopper
from day0_kernels.sparse_mla.triton import sparse_mla_decode, sparse_mla_prefill
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import Machine, compiled, recorded

CHECKS = (
    "case:sparse_mla_decode:one:bfloat16",
    "case:sparse_mla_decode:block_edges:float32",
    "case:sparse_mla_decode:padding_rows:float16",
    "case:sparse_mla_decode:only_padding:bfloat16",
    "case:sparse_mla_decode:width_above_context:float32",
    "case:sparse_mla_decode:runs:bfloat16",
    "case:sparse_mla_decode:one_position:bfloat16",
    "case:sparse_mla_decode:many_heads:bfloat16",
    "case:sparse_mla_prefill:short:bfloat16",
    "case:sparse_mla_prefill:empty_sequence:float16",
    "case:sparse_mla_prefill:no_token:bfloat16",
    "case:sparse_mla_prefill:many_sequences:bfloat16",
    "case:sparse_mla_sinks_decode:runs:bfloat16",
    "case:sparse_mla_sinks_decode:only_padding:float32",
    "case:sparse_mla_sinks_prefill:empty_sequence:float16",
    "sinks:200",
    "sinks:-200",
    "neighbours:sparse_mla_decode:runs",
    "prefill_is_decode",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_sparse_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


def _on_no_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _ids(*shape: int) -> Tensor:
    return _on_no_device(*shape, dtype=torch.int32)


def _attention(fn: Callable[..., Any], heads: int, width: int, *more: Tensor) -> Callable[[], Any]:
    """2,048 positions and the tail of a pool of 16, as GLM-5.3-Flash (width 512) and DeepSeek-V3.2 (576) have.

    By the kernels of every architecture; those of Hopper alone are in `test_sparse_mla_hopper.py`.
    """

    def call() -> Any:
        with mock.patch.object(_hopper, "serves", lambda *_: False):
            return fn(
                _on_no_device(32, heads, width),
                _on_no_device(64000, width),
                _ids(32, 2063),
                _ids(32, 1000),
                *more,
                block_size=64,
                softmax_scale=0.1,
                value_dim=512,
            )

    return call


CALLS: dict[str, Callable[[], Any]] = {
    "sparse_mla_decode-16": _attention(sparse_mla_decode, 16, 576),
    "sparse_mla_decode-32": _attention(sparse_mla_decode, 32, 576),
    "sparse_mla_decode-64": _attention(sparse_mla_decode, 64, 512),
    "sparse_mla_decode-128": _attention(sparse_mla_decode, 128, 576),
    "sparse_mla_prefill-64": _attention(sparse_mla_prefill, 64, 512, _ids(5)),
    "sparse_mla_prefill-128": _attention(sparse_mla_prefill, 128, 576, _ids(5)),
}
# Registers a thread. `attend` holds 64 heads of 512 values in float32, half of the register file, and is alone.
MOST_REGISTERS = {"attend": 255, "join": 64, "own": 128}
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
        if machine.kernel == "attend":
            # 64 heads fill a warp group's product; fewer are the smaller product of a warp.
            assert ("wgmma.mma_async" if call.endswith(("64", "128")) else "mma.sync") in machine.ptx
            assert "cp.async" in machine.ptx


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its values need."""
    launch = recorded(CALLS["sparse_mla_decode-16"])[0]
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 64})).local_bytes > 0
