"""Gated delta and short convolution in Triton without a GPU: right where interpreted, and what ships fits a Hopper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from day0_kernels.delta_gates.triton import delta_gates, gated_norm
from day0_kernels.gated_delta.triton import gated_delta_decode, gated_delta_prefill
from day0_kernels.short_conv.triton import short_conv_decode, short_conv_prefill
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import Machine, compiled, recorded

CHECKS = (
    "case:gated_delta_prefill:edges:float32",
    "case:gated_delta_prefill:edges:bfloat16",
    "case:gated_delta_prefill:odd_widths:float32",
    "case:gated_delta_prefill:no_token:bfloat16",
    "case:gated_delta_decode:one:float32",
    "case:gated_delta_decode:batch:bfloat16",
    "case:gated_delta_decode:odd_widths:float32",
    "case:gated_delta_decode:padding_rows:float16",
    "case:gated_delta_decode:only_padding:bfloat16",
    "case:short_conv_prefill:kernel_plus_1:float16",
    "case:short_conv_prefill:packed:bfloat16",
    "case:short_conv_prefill:empty_sequence:float32",
    "case:short_conv_prefill:some_padding:bfloat16",
    "case:short_conv_prefill:no_token:bfloat16",
    "case:short_conv_prefill:no_activation:float32",
    "case:short_conv_prefill:odd_channels:float32",
    "case:short_conv_prefill:kernel_of_2:bfloat16",
    "case:short_conv_prefill:many_sequences:float32",
    "case:short_conv_decode:batch:bfloat16",
    "case:short_conv_decode:padding_rows:float32",
    "case:short_conv_decode:only_padding:bfloat16",
    "case:short_conv_decode:odd_channels:float16",
    "case:short_conv_decode:kernel_of_2:float32",
    "case:delta_gates:several:bfloat16",
    "case:delta_gates:no_bound:float32",
    "case:delta_gates:odd_sizes:float16",
    "case:delta_gates:beyond_a_block:float32",
    "case:delta_gates:no_token:bfloat16",
    "case:gated_norm:several:bfloat16",
    "case:gated_norm:odd_sizes:float32",
    "case:gated_norm:wide:float16",
    "case:gated_norm:no_token:bfloat16",
    "neighbours:gated_delta_prefill:edges",
    "neighbours:gated_delta_decode:padding_rows",
    "gate:drawn",
    "gate:0",
    "gate:-0.3",
    "gate:-200",
    "gate:late:bfloat16",
    "gate:-1e5:bfloat16",
    "gate:late",
    "cut",
    "then_decode",
    "layouts",
    "far_gates",
    "convolution_cut",
    "accuracy:random",
    "accuracy:repeated",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_delta_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


# What a GLM-5.3-Flash layer launches: 64 heads of 128 x 128, 3 * 8192 channels of 4 taps.


def _on_no_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _delta(rows: int, gates: torch.dtype) -> dict[str, Tensor]:
    made = {name: _on_no_device(rows, 64, 128) for name in ("q", "k", "v")}
    return made | {
        "g": _on_no_device(rows, 64, 128, dtype=gates),
        "beta": _on_no_device(rows, 64),
        "state": _on_no_device(40, 64, 128, 128, dtype=torch.float32),
        "state_slots": _on_no_device(32, dtype=torch.int32),
    }


def _prefill(gates: torch.dtype) -> Any:
    bounds = _on_no_device(33, dtype=torch.int32)
    return gated_delta_prefill(**_delta(4096, gates), cu_seqlens=bounds, scale=0.1)


def _convolution(rows: int, state: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    slots = _on_no_device(32, dtype=torch.int32)
    # A model keeps weights and carried inputs in float32 whatever it computes in.
    return (
        _on_no_device(rows, 24576),
        _on_no_device(24576, 4, dtype=state),
        _on_no_device(40, 24576, 3, dtype=state),
        slots,
    )


def _gates(lower_bound: float | None) -> Any:
    wide = _on_no_device(64 * 128, dtype=torch.float32)
    # Rates are columns of a joined product.
    rates = _on_no_device(32, 24896)[:, -64:]
    return delta_gates(_on_no_device(32, 64, 128), rates, wide, wide[:64], lower_bound=lower_bound)


def _norm() -> Any:
    x = _on_no_device(32, 64, 128)
    return gated_norm(x, x, _on_no_device(128), norm_eps=1e-5)


CALLS: dict[str, Callable[[], Any]] = {
    "delta_gates": lambda: _gates(-5.0),
    "delta_gates-no_bound": lambda: _gates(None),
    "gated_norm": _norm,
    "gated_delta_decode": lambda: gated_delta_decode(**_delta(32, torch.float32), scale=0.1),
    "gated_delta_prefill": lambda: _prefill(torch.float32),
    "gated_delta_prefill-narrow_gates": lambda: _prefill(torch.bfloat16),
    "short_conv_decode": lambda: short_conv_decode(*_convolution(32)),
    "short_conv_decode-float32_state": lambda: short_conv_decode(*_convolution(32, torch.float32)),
    "short_conv_prefill": lambda: short_conv_prefill(*_convolution(4096), _on_no_device(33, dtype=torch.int32)),
    "short_conv_prefill-float32_state": lambda: short_conv_prefill(
        *_convolution(4096, torch.float32), _on_no_device(33, dtype=torch.int32)
    ),
}
# Registers a thread that leave room for as many programs as each kernel needs at once: decode five of 64 threads to
# cover its memory, the state pass two of 128, the chunk terms eleven of 32.
MOST_REGISTERS = {"decode_step": 168, "chunk_terms": 176, "state_pass": 200}
MOST_REGISTERS_OTHERWISE = 96


def _machines(call: str) -> list[Machine]:
    launches = recorded(CALLS[call])
    assert launches
    return [compiled(launch) for launch in launches]


@pytest.mark.parametrize("call", CALLS)
def test_fits_the_machine(call: str) -> None:
    for machine in _machines(call):
        assert machine.local_bytes == 0, machine.kernel
        assert machine.registers <= MOST_REGISTERS.get(machine.kernel, MOST_REGISTERS_OTHERWISE), machine
        if machine.kernel == "decode_step":
            # Each of the 64 state values of a thread is read and written once, four at a time.
            for access in ("ld.global", "st.global"):
                lines = [line for line in machine.ptx.splitlines() if access in line and "evict_first" in line]
                assert len(lines) == 16 and all(".v4.b32" in line for line in lines), access
        if machine.kernel == "chunk_terms":
            assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in machine.ptx
        if machine.kernel == "state_pass":
            products = [line for line in machine.ptx.splitlines() if "wgmma.mma_async" in line]
            # 8 steps for the state times both operands, one for `new` and the output, one for the state's update.
            assert len(products) == 10 and all(".f32.f16.f16" in line for line in products)
            assert "cp.async" in machine.ptx and "mma.sync" not in machine.ptx
            # The state goes from accumulator to operand in registers: a left operand is a list of them too.
            assert all(line.count("{") == 2 for line in products)


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its values need."""
    (launch,) = recorded(CALLS["gated_delta_decode"])
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 64})).local_bytes > 0
