"""Sparse attention's own kernels for Hopper, without one: which calls they take, how they cut them, what is compiled.

No interpreter runs Gluon; on a GPU `tests/gpu` holds them against the reference.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from day0_kernels.sparse_mla import _hopper
from day0_kernels.sparse_mla.triton import sparse_mla_decode, sparse_mla_prefill, sparse_mla_sinks_decode
from tests.kernels.triton_offline import Machine, compiled, recorded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHOSEN = {"RUN_POSITIONS": 512, "IN_TURN_FROM": 96, "PROGRAMS": 128, "MOST_PIECES": 4}
# 64 thousand registers of a multiprocessor for three groups of 128 threads; the groups then share them unevenly.
REGISTERS_AT_LAUNCH = 168
LARGEST_SHARED_BYTES = 227 * 1024


def _on_no_device(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _call(
    rows: int, heads: int, width: int, *, packed: bool = False, sinks: bool = False, dtype: torch.dtype = BF16
) -> Callable[[], Any]:
    """2,048 positions and the tail of a pool of 16."""
    ids = (_on_no_device(rows, 2063, dtype=torch.int32), _on_no_device(rows, 1000, dtype=torch.int32))
    fn: Callable[..., Any] = sparse_mla_prefill if packed else sparse_mla_decode
    more: tuple[Tensor, ...] = (_on_no_device(5, dtype=torch.int32),) if packed else ()
    if sinks:
        fn, more = sparse_mla_sinks_decode, (_on_no_device(heads, dtype=FP32),)
    return lambda: fn(
        _on_no_device(rows, heads, width, dtype=dtype),
        _on_no_device(64000, width, dtype=dtype),
        *ids,
        *more,
        block_size=64,
        softmax_scale=0.1,
        value_dim=512,
    )


def test_takes_the_two_latents_in_half_precision_only() -> None:
    def serves(width: int, value_dim: int, dtype: torch.dtype) -> bool:
        return _hopper.serves(_on_no_device(1, 1, width, dtype=dtype), _on_no_device(1, width, dtype=dtype), value_dim)

    for dtype in (BF16, FP16):
        assert serves(512, 512, dtype) and serves(576, 512, dtype)
    assert not serves(512, 512, FP32)
    for width, value_dim in ((544, 512), (576, 576), (256, 256), (512, 448)):
        assert not serves(width, value_dim, BF16), (width, value_dim)
    shifted = torch.empty(64 * 512 + 1, dtype=BF16)[1:].view(1, 64, 512)
    assert not _hopper.serves(shifted, shifted[0], 512)
    assert not _hopper.serves(_on_no_device(1, 64, 512), shifted[0], 512)


@pytest.mark.parametrize("positions", (0, 1, 127, 128, 129, 511, 512, 513, 768, 1024, 2047, 2048, 2049, 2063, 4096))
def test_runs_begin_at_the_same_positions_whatever_the_batch(positions: int) -> None:
    plans = [_hopper.plan(rows, groups, positions, CHOSEN) for groups in (1, 2) for rows in (*range(1, 200), 5000)]
    assert len({(how.runs, how.run_width) for how in plans}) == 1
    for how in plans:
        assert how.run_width % _hopper.PAIR == 0
        assert (how.runs - 1) * how.run_width < max(1, positions) <= how.runs * how.run_width
        # Neither a part of a run nor a piece of columns for a run that a program has to itself no more.
        assert how.pieces == 1 or how.apart
        assert how.runs > 1 or not how.apart


def test_few_rows_are_spread_and_many_are_not() -> None:
    at = {rows: _hopper.plan(rows, 1, 2048, CHOSEN) for rows in (1, 8, 9, 16, 17, 32, 95, 96, 128)}
    assert {rows: (how.apart, how.pieces) for rows, how in at.items()} == {
        1: (True, 4),
        8: (True, 4),
        9: (True, 2),
        16: (True, 2),
        17: (True, 1),
        32: (True, 1),
        95: (True, 1),
        96: (False, 1),
        128: (False, 1),
    }
    assert at[1].runs == 4
    assert not _hopper.plan(48, 2, 2048, CHOSEN).apart


CALLS: dict[str, Callable[[], Any]] = {
    **{f"decode-{rows}-64": _call(rows, 64, 512) for rows in (1, 12, 32, 128)},
    **{f"decode-{rows}-128": _call(rows, 128, 576) for rows in (1, 128)},
    "decode-128-16": _call(128, 16, 576),
    "sinks-1-64": _call(1, 64, 512, sinks=True),
    "sinks-128-128": _call(128, 128, 576, sinks=True),
    "prefill-64": _call(32, 64, 512, packed=True),
    "prefill-128": _call(32, 128, 576, packed=True),
    "prefill-64-float16": _call(32, 64, 512, packed=True, dtype=FP16),
}


def _serialised(machine: Machine, folder: Path) -> bool:
    """Whether the assembler says that it lets no two products run together."""
    source = folder / "kernel.ptx"
    source.write_text(machine.ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "registers" in said
    return "wgmma.mma_async instructions are serialized" in said


@pytest.mark.parametrize("call", CALLS)
def test_fits_the_machine(call: str, tmp_path: Path) -> None:
    found = {launch.kernel.__name__: launch for launch in recorded(CALLS[call])}
    assert "attend" not in found
    machine = compiled(found["attend_pairs"])
    assert machine.local_bytes == 0
    assert machine.registers == REGISTERS_AT_LAUNCH
    assert machine.shared_bytes <= LARGEST_SHARED_BYTES
    columns = 512 // found["attend_pairs"].arguments["PIECES"] // 2
    for product in ("m64n64k16", f"m64n{columns}k16"):
        assert f"wgmma.mma_async.sync.aligned.{product}" in machine.ptx
    assert "cp.async.cg.shared.global" in machine.ptx and "cp.async.mbarrier.arrive.noinc" in machine.ptx
    assert not _serialised(machine, tmp_path)
    if "join_runs" in found:
        joined = compiled(found["join_runs"])
        assert joined.local_bytes == 0 and joined.registers <= 64
        assert "griddepcontrol.wait" in joined.ptx and "griddepcontrol.launch_dependents" in machine.ptx
