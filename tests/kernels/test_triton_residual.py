"""Residual mixing and quantising cache writes in Triton: interpreted against their references, and for an H200."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from day0_kernels.attention_residual.triton import attention_residual
from day0_kernels.fp8_cache_write.triton import index_key_store_fp8, latent_and_key_store_fp8, latent_store_fp8
from day0_kernels.hyper_connection.triton import hc_pre, hc_pre_norm
from tests.kernels.check_process import run_checks
from tests.kernels.triton_offline import compiled, recorded

CHECKS = (
    "case:hc_pre:tile_plus_1:bfloat16",
    "case:hc_pre_norm:one:float16",
    "case:hc_pre_norm:no_token:bfloat16",
    "case:hc_pre_norm:four_streams:bfloat16",
    "case:hc_pre_norm:odd_width:float32",
    "sizes",
    "case:attention_residual:one:bfloat16",
    "case:attention_residual:no_token:bfloat16",
    "case:attention_residual:one_source:float32",
    "case:attention_residual:two_sources:float16",
    "case:attention_residual:most_sources:bfloat16",
    "case:attention_residual:odd_width:bfloat16",
    "case:attention_residual:width_above_a_power:float32",
    "case:attention_residual:three_queries:bfloat16",
    "neighbours:attention_residual:nine_sources",
    "bank",
    "broken:hc_pre",
    "broken:hc_pre_norm",
    "broken:hc_post",
    "broken:attention_residual",
    "case:latent_store_fp8:block_plus_1:bfloat16",
    "case:latent_store_fp8:all_padding:bfloat16",
    "case:latent_store_fp8:no_token:bfloat16",
    "case:latent_store_fp8:without_tail:float16",
    "case:latent_store_fp8:mla:float32",
    "case:index_key_store_fp8:packed:bfloat16",
    "case:index_key_store_fp8:some_padding:float16",
    "case:index_key_store_fp8:no_power_of_two:float32",
    "case:latent_and_key_store_fp8:some_padding:bfloat16",
    "every_bfloat16",
    "halfway",
    "refused",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_residual_checks", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]


BF16, INT, BYTE = torch.bfloat16, torch.int32, torch.uint8
_MIXING: dict[str, Any] = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def _make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _pre(dtype: torch.dtype, tokens: int = 1, streams: int = 4, width: int = 4096) -> Callable[[], Any]:
    rows = (2 + streams) * streams
    arguments = _make(tokens, streams, width, dtype=dtype), _make(rows, streams * width), _make(rows), _make(3)
    return lambda: hc_pre(*arguments, **_MIXING)


def _pre_norm(tokens: int, width: int) -> Callable[[], Any]:
    arguments = _make(tokens, 4, width, dtype=BF16), _make(24, 4 * width), _make(24), _make(3)
    return lambda: hc_pre_norm(*arguments, _make(width, dtype=BF16), **_MIXING, layer_norm_eps=1e-6)


def _residual(width: int, queries: int = 1, dtype: torch.dtype = BF16) -> Callable[[], Any]:
    bank, query = _make(9, 64, width, dtype=dtype).transpose(0, 1), _make(queries, width)
    return lambda: attention_residual(bank, query, logit_scale=1.0, norm_eps=1e-6, normed_values=queries > 1)


def _write(tokens: int, name: str) -> Callable[[], Any]:
    latent = _make(tokens, 576, dtype=BF16), _make(6400, 656, dtype=BYTE), _make(tokens, dtype=INT)
    key = _make(tokens, 128, dtype=BF16), _make(100, 64 * 132, dtype=BYTE), _make(tokens, dtype=INT)
    if name == "latent":
        return lambda: latent_store_fp8(*latent, value_dim=512)
    if name == "key":
        return lambda: index_key_store_fp8(*key)
    return lambda: latent_and_key_store_fp8(*latent, *key, value_dim=512)


# Call and the most registers a thread.
MACHINES: dict[str, tuple[Callable[[], Any], int]] = {
    "hc_pre-float16": (_pre(torch.float16), 128),
    "hc_pre-float32": (_pre(torch.float32), 128),
    "hc_pre_norm-1": (_pre_norm(1, 4096), 128),
    "hc_pre_norm-4096": (_pre_norm(4096, 4096), 128),
    "hc_pre_norm-4096-7168": (_pre_norm(4096, 7168), 128),
    "hc_pre-1": (_pre(torch.bfloat16), 128),
    "hc_pre-513": (_pre(torch.bfloat16, 513), 128),
    "attention_residual-4096": (_residual(4096), 128),
    "attention_residual-7168": (_residual(7168), 208),
    "attention_residual-7168-three": (_residual(7168, 3), 128),
    "attention_residual-7168-float32": (_residual(7168, dtype=torch.float32), 208),
    **{f"{name}-{t}": (_write(t, name), 64) for t in (1, 4096) for name in ("latent", "key", "both")},
}


@pytest.mark.parametrize("name", MACHINES)
def test_fits_the_machine(name: str) -> None:
    call, most_registers = MACHINES[name]
    machines = [compiled(launch) for launch in recorded(call)]
    for machine in machines:
        assert machine.local_bytes == 0 and machine.registers <= most_registers, machine
        if machine.kernel == "mix_kernel":
            # The loop's next copy overwrites the tile: no product may still read it then.
            waits = re.findall(r"wgmma.wait_group.sync.aligned\s+(\d+)", machine.ptx)
            assert set(waits) <= {"0"}, waits
    machine = machines[0]
    if name.startswith("attention_residual") and not name.endswith("three"):
        # The next sources are on their way while this one is added up.
        assert "cp.async" in machine.ptx
    if name.startswith(("latent", "key", "both")):
        # Divisions that round as torch's do, and the machine's own conversion.
        assert "div.rn.f32" in machine.ptx and "div.full.f32" not in machine.ptx
        assert "cvt.rn.satfinite.e4m3x2.f32" in machine.ptx
