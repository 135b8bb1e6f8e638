"""What cannot fit is refused before a weight is read, with the settings to change."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from llm_svc import memory_check
from llm_svc.build import LoadError
from llm_svc.memory_check import MemoryNeed, check_memory
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load

MIB = 2**20


def never(done: int, expected: int) -> None:
    raise AssertionError("weights were read")


@pytest.mark.parametrize("tier", ["native", "upstream"])
def test_weights_that_do_not_fit(tiny_checkpoint: Path, tier: str) -> None:
    settings = LlmSettings(model=str(tiny_checkpoint), block_size=16, tier=tier, max_memory_bytes=MIB)
    with pytest.raises(LoadError, match=r"memory: weights take 0\.00 GiB in float32.*0\.00 GiB are available"):
        load(settings, never)


def test_caches_that_do_not_fit_name_their_settings(tiny_checkpoint: Path) -> None:
    settings = LlmSettings(model=str(tiny_checkpoint), block_size=16, cache_tokens=10**9, max_memory_bytes=4 * 2**30)
    with pytest.raises(LoadError, match=re.escape("cache_tokens 1000000000, max_running_sequences 64")):
        load(settings, never)
    load(LlmSettings(model=str(tiny_checkpoint), block_size=16, max_memory_bytes=64 * MIB))


def test_limits_that_starve_prefills_are_refused_before_reading(tiny_checkpoint: Path) -> None:
    settings = LlmSettings(model=str(tiny_checkpoint), block_size=16, max_batch_tokens=64, prefill_chunk_tokens=64)
    with pytest.raises(ValueError, match="max_batch_tokens 64 must be at least"):
        load(settings, never)


def test_a_control_group_bounds_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "_CGROUP", tmp_path)
    machine = psutil.virtual_memory().available
    assert memory_check.available_bytes() == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_check.available_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_check.available_bytes() == pytest.approx(machine, rel=0.2)


def test_workspace_and_slots_count_and_name_their_settings(packed_checkpoint: Path) -> None:
    settings = LlmSettings(
        model=str(packed_checkpoint),
        block_size=16,
        experts_residency="host",
        experts_device_slots=4,
        experts_convert_tokens=7,
        max_memory_bytes=MIB,
    )
    with pytest.raises(LoadError) as refused:
        load(settings, never)
    assert "workspace 0.00 GiB (experts_workspace_bytes 1073741824, experts_convert_tokens 7)" in str(refused.value)
    assert "expert slots 0.00 GiB (experts_device_slots 4)" in str(refused.value)
    small = settings.model_copy(update={"experts_workspace_bytes": 4095})
    with pytest.raises(ValueError, match="experts_workspace_bytes 4095 must be at least 4096, one expert"):
        load(small, never)


@pytest.mark.parametrize("part", ["cache_bytes", "workspace_bytes", "slot_bytes"])
def test_each_part_counts_after_the_loading_budget_has_gone(tmp_path: Path, part: str) -> None:
    settings = LlmSettings(model=str(tmp_path), max_memory_bytes=100 * MIB, load_budget_bytes=30 * MIB)
    check_memory(settings, MemoryNeed(60 * MIB, **{part: 40 * MIB}))
    with pytest.raises(LoadError, match=r"0\.10 GiB at the peak"):
        check_memory(settings, MemoryNeed(60 * MIB, **{part: 40 * MIB + 1}))
    with pytest.raises(LoadError, match=r"0\.10 GiB at the peak"):
        check_memory(settings, MemoryNeed(71 * MIB, **{part: 1}))


def test_on_a_gpu_its_own_memory_counts_and_experts_on_the_host_do_not() -> None:
    need = MemoryNeed(weight_bytes=10 * MIB, expert_bytes=8 * MIB, cache_bytes=MIB)
    settings = {"model": "unused", "device": "cuda"}
    check_memory(LlmSettings(**settings, max_memory_bytes=11 * MIB), need)
    with pytest.raises(LoadError, match="memory: weights take"):
        check_memory(LlmSettings(**settings, max_memory_bytes=11 * MIB - 1), need)
    check_memory(LlmSettings(**settings, experts_residency="host", max_memory_bytes=3 * MIB), need)
    with pytest.raises(LoadError, match="memory: weights take"):
        check_memory(LlmSettings(**settings, experts_residency="host", max_memory_bytes=3 * MIB - 1), need)


def test_without_a_gpu_cuda_is_refused_before_reading(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LoadError, match="device: cuda, and this process sees no CUDA device; use cpu"):
        load(LlmSettings(model=str(tiny_checkpoint), device="cuda"), never)
