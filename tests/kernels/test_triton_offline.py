"""Machine code for an H200 of what the Triton backends ship: no spills, few registers, e4m3 products in experts."""

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
from day0_kernels.hyper_connection.triton import hc_post, hc_pre
from day0_kernels.index_pool.triton import index_pool
from day0_kernels.kv_store.triton import kv_store
from day0_kernels.mxfp4_expert_gemm.triton import mxfp4_expert_gemm
from day0_kernels.mxfp4_to_fp8.triton import mxfp4_to_fp8
from tests.kernels.triton_offline import Machine, compiled, recorded

FOLDER = Path(day0_kernels.__file__).parent
BF16, INT, BYTE = torch.bfloat16, torch.int32, torch.uint8


def _on_no_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _sizes(folder: str, kernel: str) -> list[int]:
    """One size for each committed configuration of a kernel."""
    entries = json.loads((FOLDER / folder / "sm_90.json").read_text())[kernel]
    bounds = [entry["up_to"] for entry in entries]
    assert bounds[-1] is None and bounds[:-1] == sorted(bounds[:-1])
    return [*bounds[:-1], (bounds[-2] if len(bounds) > 1 else 0) + 1]


def _pre(streams: int, tokens: int, weight: torch.dtype = torch.float32) -> Callable[[], Any]:
    make, width = _on_no_device, 4096
    outputs = (2 + streams) * streams
    return lambda: hc_pre(
        make(tokens, streams, width, dtype=BF16),
        make(outputs, streams * width, dtype=weight),
        make(outputs),
        make(3),
        norm_eps=1e-5,
        hc_eps=1e-6,
        sinkhorn_iters=20,
    )


def _post(streams: int, tokens: int) -> Callable[[], Any]:
    make = _on_no_device
    return lambda: hc_post(
        make(tokens, streams, 4096, dtype=BF16),
        make(tokens, 4096, dtype=BF16),
        make(tokens, streams),
        make(tokens, streams, streams),
    )


def _store(tokens: int) -> Callable[[], Any]:
    make = _on_no_device
    return lambda: kv_store(make(tokens, 576, dtype=BF16), make(6400, 576, dtype=BF16), make(tokens, dtype=INT))


def _pool(pool: int) -> Callable[[], Any]:
    make = _on_no_device
    rows, places = make(8192, 128, dtype=BF16), make(8, dtype=INT)
    tail, pools = make(64, pool, 2, 128, dtype=BF16), make(65536 // pool, 128, dtype=BF16)
    table, bounds = make(8, 1024, dtype=INT), make(9, dtype=INT)
    ape = make(pool, 128, dtype=BF16)
    return lambda: index_pool(rows, rows, ape, tail, pools, places, table, bounds, places, block_size=64)


def _convert() -> Any:
    shape = (288, 4096)
    return mxfp4_to_fp8(*(_on_no_device(*shape, width, dtype=BYTE) for width in (2048, 128, 4096)))


def _product(rows_an_expert: int, dtype: torch.dtype, outputs: int = 4096) -> Callable[[], Any]:
    make = _on_no_device
    return lambda: mxfp4_expert_gemm(
        make(288 * rows_an_expert, 4096, dtype=dtype),
        make(288, outputs, 2048, dtype=BYTE),
        make(288, outputs, 128, dtype=BYTE),
        make(289, dtype=INT),
    )


CALLS = {
    **{f"hc_pre-{m}-{t}": _pre(m, t) for m in (2, 4) for t in _sizes("hyper_connection", "pre")},
    **{f"hc_pre-bfloat16-{t}": _pre(4, t, BF16) for t in _sizes("hyper_connection", "pre")},
    **{f"hc_post-{m}-{t}": _post(m, t) for m in (2, 4) for t in _sizes("hyper_connection", "mixed")},
    **{f"kv_store-{t}": _store(t) for t in _sizes("kv_store", "store")},
    **{f"index_pool-{pool}": _pool(pool) for pool in (4, 16)},
    "mxfp4_to_fp8": _convert,
    **{f"mxfp4_expert_gemm-{n}": _product(n, BF16) for n in _sizes("mxfp4_expert_gemm", "product")},
    # Outputs that are no whole tiles.
    **{f"mxfp4_expert_gemm-4100-{n}": _product(n, BF16, 4100) for n in _sizes("mxfp4_expert_gemm", "product")},
}
# Registers a thread that leave room for the programs a multiprocessor must hold at once to hide its memory.
MOST_REGISTERS = {
    "mix_kernel": 128,
    "mixed_kernel": 128,
    "product_kernel": 192,
    "few_rows_kernel": 128,
    "pool_kernel": 96,
}
MOST_REGISTERS_OTHERWISE = 64
LARGEST_SHARED_BYTES = 227 * 1024


def _machines(call: str) -> list[Machine]:
    launches = recorded(CALLS[call])
    assert launches
    return [compiled(launch) for launch in launches]


@pytest.mark.parametrize("call", CALLS)
def test_fits_the_machine(call: str) -> None:
    for machine in _machines(call):
        assert machine.local_bytes == 0, machine.kernel
        assert machine.shared_bytes <= LARGEST_SHARED_BYTES
        assert machine.registers <= MOST_REGISTERS.get(machine.kernel, MOST_REGISTERS_OTHERWISE), machine
        if machine.kernel in ("product_kernel", "few_rows_kernel"):
            # e4m3 by e4m3 on the tensor cores, the left operand from registers: only the right one has a descriptor.
            products = [line for line in machine.ptx.splitlines() if "wgmma.mma_async" in line]
            assert products and all(".e4m3.e4m3" in line for line in products)
            assert "mma.sync" not in machine.ptx
        if machine.kernel == "mix_kernel":
            assert "wgmma.mma_async" in machine.ptx


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its values need."""
    (launch,) = recorded(CALLS["hc_post-4-513"])
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 24})).local_bytes > 0
