"""Attention over FP8 latents and over whole paged sequences in Triton without a GPU: interpreted, and as compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import day0_kernels
from day0_kernels.fp8_sparse_mla import _hopper
from day0_kernels.fp8_sparse_mla.triton import fp8_sparse_mla_decode, fp8_sparse_mla_prefill, row_bytes
from day0_kernels.paged_attention.triton import paged_gqa_decode, paged_mla_decode
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import Machine, compiled, recorded

CHECKS = (
    "case:fp8_sparse_mla_decode:one:bfloat16",
    "case:fp8_sparse_mla_decode:tile_edges:bfloat16",
    "case:fp8_sparse_mla_decode:topk_edges:float32:1",
    "case:fp8_sparse_mla_decode:padding_rows:float16",
    "case:fp8_sparse_mla_decode:only_padding:bfloat16",
    "case:fp8_sparse_mla_decode:without_tail:float32",
    "case:fp8_sparse_mla_decode:four_groups:bfloat16",
    "case:fp8_sparse_mla_decode:width_above_context:bfloat16",
    "case:fp8_sparse_mla_decode:runs:bfloat16",
    "case:fp8_sparse_mla_decode:many_heads:bfloat16",
    "case:fp8_sparse_mla_prefill:two_groups:bfloat16",
    "case:fp8_sparse_mla_prefill:empty_sequence:bfloat16",
    "case:fp8_sparse_mla_prefill:no_token:bfloat16",
    "case:fp8_sparse_mla_prefill:many_sequences:float16",
    "case:paged_mla_decode:one:bfloat16",
    "case:paged_mla_decode:tile_edges:float32",
    "case:paged_mla_decode:padding_rows:float16",
    "case:paged_mla_decode:only_padding:bfloat16",
    "case:paged_mla_decode:without_tail:bfloat16:1",
    "case:paged_mla_decode:runs:bfloat16",
    "case:paged_gqa_decode:one:bfloat16",
    "case:paged_gqa_decode:batch:float32",
    "case:paged_gqa_decode:padding_rows:bfloat16",
    "case:paged_gqa_decode:every_head_its_own:float16",
    "case:paged_gqa_decode:sixteen_a_group:bfloat16",
    "case:paged_gqa_decode:wide:bfloat16",
    "case:paged_gqa_decode:runs:bfloat16:1",
    "neighbours:fp8_sparse_mla_decode:padding_rows",
    "neighbours:fp8_sparse_mla_prefill:empty_sequence",
    "neighbours:paged_mla_decode:batch",
    "neighbours:paged_gqa_decode:runs",
    "prefill_is_decode",
    "codes",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_paged_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


def _on_no_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _ids(*shape: int) -> Tensor:
    return _on_no_device(*shape, dtype=torch.int32)


def _sizes(folder: str, kernel: str, largest: int) -> list[int]:
    """One size for each committed configuration of a kernel."""
    entries = json.loads((Path(day0_kernels.__file__).parent / folder / "sm_90.json").read_text())[kernel]
    bounds = [entry["up_to"] for entry in entries]
    assert bounds[-1] is None and bounds[:-1] == sorted(bounds[:-1])
    return [*bounds[:-1], largest]


def _fp8(
    fn: Callable[..., Any], rows: int, heads: int, width: int, *more: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Any]:
    """2,048 positions and the tail of a pool of 16, as GLM-5.3-Flash (width 512) and DeepSeek-V3.2 (576) have."""
    return lambda: fn(
        _on_no_device(rows, heads, width, dtype=dtype),
        _on_no_device(64000, row_bytes(width, 512), dtype=torch.uint8),
        _ids(rows, 2063),
        _ids(rows, 1000),
        *more,
        block_size=64,
        softmax_scale=0.1,
        value_dim=512,
    )


def _anywhere(call: Callable[[], Any]) -> Callable[[], Any]:
    """By the kernels of every architecture."""

    def made() -> Any:
        with mock.patch.object(_hopper, "serves", lambda *_: False):
            return call()

    return made


def _latents(heads: int, width: int) -> Callable[[], Any]:
    return lambda: paged_mla_decode(
        _on_no_device(32, heads, width),
        _on_no_device(64000, width),
        _ids(32, 1000),
        _ids(32),
        block_size=64,
        softmax_scale=0.1,
        value_dim=512,
    )


def _pairs(width: int) -> Callable[[], Any]:
    cache = _on_no_device(64000, 8, width)
    return lambda: paged_gqa_decode(
        _on_no_device(32, 64, width), cache, cache, _ids(32, 1000), _ids(32), block_size=64, softmax_scale=0.1
    )


CALLS: dict[str, Callable[[], Any]] = {
    **{
        f"fp8_sparse_mla_decode-{heads}": _anywhere(_fp8(fp8_sparse_mla_decode, 32, heads, 576))
        for heads in _sizes("fp8_sparse_mla", "attend", 128)
    },
    "fp8_sparse_mla_decode-512-64": _anywhere(_fp8(fp8_sparse_mla_decode, 32, 64, 512)),
    "fp8_sparse_mla_prefill-512-64": _anywhere(_fp8(fp8_sparse_mla_prefill, 32, 64, 512, _ids(5))),
    "fp8_sparse_mla_prefill-128": _anywhere(_fp8(fp8_sparse_mla_prefill, 32, 128, 576, _ids(5))),
    **{f"paged_mla_decode-{heads}": _latents(heads, 576) for heads in _sizes("paged_attention", "attend_latents", 128)},
    "paged_mla_decode-512-64": _latents(64, 512),
    **{f"paged_gqa_decode-{width}": _pairs(width) for width in _sizes("paged_attention", "attend_pairs", 256)},
}
# Registers a thread. The first two hold 64 heads of 512 values in float32, half of the register file, and are alone.
MOST_REGISTERS = {"attend": 255, "attend_latents": 255, "attend_pairs": 128, "join": 64, "join_runs": 64, "own": 128}
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
        if machine.kernel in ("attend", "attend_latents"):
            # 64 heads fill a warp group's product; fewer are the smaller product of a warp.
            assert ("wgmma.mma_async" if call.endswith(("64", "128")) else "mma.sync") in machine.ptx
        if machine.kernel in ("attend_latents", "attend_pairs"):
            assert "cp.async.cg" in machine.ptx
        if machine.kernel == "attend":
            assert "cvt.rn.f16x2.e4m3x2" in machine.ptx and "ld.global.v4.b32" in machine.ptx


def test_no_warp_group_does_the_other_ones_scores() -> None:
    """64 heads by 64 positions: each of two warp groups has half of the positions, in the 512 codes and the tail."""
    (machine,) = [one for one in _machines("fp8_sparse_mla_decode-128") if one.kernel == "attend"]
    assert machine.ptx.count("wgmma.mma_async.sync.aligned.m64n32k16") == (512 + 64) // 16


# By rows, and so by what a program does: pieces of a run apart, a run apart, runs in turn, or all positions.
ON_HOPPER: dict[str, Callable[[], Any]] = {
    **{f"decode-{rows}-64": _fp8(fp8_sparse_mla_decode, rows, 64, 512) for rows in (1, 32, 128)},
    **{f"decode-{rows}-128": _fp8(fp8_sparse_mla_decode, rows, 128, 576) for rows in (1, 128)},
    "decode-128-16": _fp8(fp8_sparse_mla_decode, 128, 16, 576),
    "prefill-64": _fp8(fp8_sparse_mla_prefill, 32, 64, 512, _ids(5)),
    "prefill-128": _fp8(fp8_sparse_mla_prefill, 32, 128, 576, _ids(5)),
    "prefill-128-float16": _fp8(fp8_sparse_mla_prefill, 32, 128, 576, _ids(5), dtype=torch.float16),
}
# 64 thousand registers of a multiprocessor for three groups of 128 threads; the groups then share them unevenly.
REGISTERS_AT_LAUNCH = 168


@pytest.mark.parametrize("call", ON_HOPPER)
def test_fits_a_hopper(call: str) -> None:
    found = {launch.kernel.__name__: launch for launch in recorded(ON_HOPPER[call])}
    assert "attend" not in found
    machine = compiled(found["attend_pairs"])
    assert machine.local_bytes == 0
    assert machine.registers == REGISTERS_AT_LAUNCH
    assert machine.shared_bytes <= LARGEST_SHARED_BYTES
    columns = 512 // found["attend_pairs"].arguments["PIECES"] // 2
    for product in ("m64n32k16", f"m64n{columns}k16"):
        assert f"wgmma.mma_async.sync.aligned.{product}" in machine.ptx
    assert "cvt.rn.f16x2.e4m3x2" in machine.ptx and "cp.async.bulk.prefetch.L2.global" in machine.ptx


def test_a_program_that_spills_is_seen() -> None:
    """The bound above can fail: the same program in fewer registers than its values need."""
    launch = next(one for one in recorded(CALLS["paged_gqa_decode-128"]) if one.kernel.__name__ == "attend_pairs")
    assert compiled(replace(launch, options={**launch.options, "maxnreg": 32})).local_bytes > 0
