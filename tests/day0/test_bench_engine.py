"""Steps of the engine are timed on a real small model, and the preset has the shapes it names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from day0.bench.engine import PRESETS, DecodeRow, EngineOptions, PrefillRow, Row, bench_engine
from day0.bench.engine_floor import step_bytes
from day0.bench.engine_soak import SoakResult
from day0.cli import app
from day0.embedded import embedded_model
from llm_svc.cache.storage import IndexedLayerCache
from llm_svc.native_runner import NativeRunner
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load


def test_every_prefill_and_batch_is_timed_in_turn() -> None:
    told: list[Row | SoakResult] = []
    options = EngineOptions(
        str(embedded_model()), batches=(1, 2), contexts=(40, 70), prefills=(90,), steps=2, max_batch_tokens=256
    )
    result = bench_engine(options, told.append)
    prefill, *decodes = told
    assert isinstance(prefill, PrefillRow) and prefill.tokens == 90 and prefill.seconds > 0
    assert prefill.tokens_per_second == pytest.approx(90 / prefill.seconds)
    for row, expected in zip(decodes, [(1, 40), (2, 40), (1, 70), (2, 70)], strict=True):
        assert isinstance(row, DecodeRow) and (row.batch, row.context_tokens) == expected
        assert 0 < row.host_ms <= row.decode_ms
        assert row.tokens_per_second == pytest.approx(row.batch / row.decode_ms * 1e3)
        assert row.floor_ms is None and row.upstream_ms is None
    assert [row["batch"] for row in result["decode"]] == [1, 2, 1, 2] and len(result["prefill"]) == 1
    assert result["operator_backends"]["sparse_mla_decode"] == "reference"


def test_unmodified_transformers_stand_beside_ours(tiny_checkpoint: Path) -> None:
    options = EngineOptions(
        str(tiny_checkpoint), batches=(2,), contexts=(20,), prefills=(30,), steps=1, compare_upstream=True
    )
    result = bench_engine(options)
    assert result["upstream"][0]["versions"]["transformers"][0].isdigit()
    (decode,), (prefill,) = result["decode"], result["prefill"]
    assert decode["upstream_ms"] > 0 and prefill["upstream_seconds"] > 0
    assert decode["upstream_error"] is None and prefill["upstream_error"] is None


def test_upstream_that_is_too_late_is_said(tiny_checkpoint: Path) -> None:
    options = EngineOptions(str(tiny_checkpoint), contexts=(20,), steps=1, compare_upstream=True, upstream_seconds=0.01)
    (decode,) = bench_engine(options)["decode"]
    assert decode["upstream_ms"] is None and decode["upstream_error"] == "not reached in its time"


def test_the_bytes_of_a_step() -> None:
    """Against the tensors themselves, counted another way."""
    model = load(LlmSettings(model=str(embedded_model()), cache_tokens=1024, max_running_sequences=2))
    assert isinstance(model.runner, NativeRunner)
    native = model.runner.model
    config, table = native.language_model.config, native.language_model.embed_tokens.weight
    found = {batch: step_bytes(native, batch, context_tokens=64) for batch in (1, 2, 3)}
    everything = sum(p.nbytes for p in native.language_model.parameters())
    if native.lm_head.weight is not table:
        everything += native.lm_head.weight.nbytes - table.nbytes
    experts = [module.packed for module in native.language_model.modules() if getattr(module, "packed", None)]
    whole = sum(w.codes.nbytes + w.scales.nbytes for e in experts for w in (e.gate_up, e.down))
    missed = 1 - config.num_experts_per_tok / config.num_local_experts
    for batch, bytes_ in found.items():
        assert bytes_.weights == everything + batch * table.shape[1] * 4
        assert bytes_.experts == pytest.approx(whole * (1 - missed**batch), abs=1)
        assert bytes_.caches == batch * found[1].caches
        assert bytes_.total == bytes_.weights + bytes_.experts + bytes_.caches

    def grown(before: int, after: int) -> int:
        return step_bytes(native, 1, after).caches - step_bytes(native, 1, before).caches

    indexed = [layer for layer in native.layers if isinstance(layer, IndexedLayerCache)]
    keys = sum(4 * layer.pool_keys.shape[1] for layer in indexed if layer.pool_keys is not None)
    pool, most = config.index_kpool, config.index_topk
    assert grown(pool - 1, pool) == keys + sum(4 * layer.latents.shape[1] for layer in indexed)
    # Beyond the tokens it may choose a step reads no more rows, only more keys.
    assert grown(most, most + pool) == keys > 0


def test_a_soak_ends_with_everything_given_back(tiny_checkpoint: Path) -> None:
    told: list[Row | SoakResult] = []
    options = EngineOptions(str(tiny_checkpoint), batches=(4,), contexts=(60,), steps=1, soak_seconds=4.0)
    result = bench_engine(options, told.append)
    soaked = told[-1]
    assert isinstance(soaked, SoakResult)
    assert soaked.finished > 10 and soaked.cancelled > 0 and soaked.failed == 0
    assert (soaked.lost_blocks, soaked.lost_slots) == (0, 0) and soaked.decode_steps > 0
    assert result["soak"]["finished"] == soaked.finished


def test_what_a_soak_must_not_show() -> None:
    well = SoakResult(1.0, 5, 1, 0, 100, 1.02, 4, 0, 0, True, 10, 10)
    assert well.problems() == []
    wrong = replace(well, failed=2, lost_blocks=3, step_drift=1.5, bytes_after=1 << 30)
    assert [text.split()[0] for text in wrong.problems()] == ["2", "3", "a", "1,073,741,814"]
    assert replace(well, step_drift=None, on_gpu=False, bytes_after=1 << 30).problems() == []


def test_the_preset_is_the_slice_it_says() -> None:
    config = PRESETS["glm-5.3-flash-8-layers"]().text_config
    assert list(config.layer_types).count("linear_attention") == 6 and len(config.layer_types) == 8
    assert list(config.mlp_layer_types).count("sparse") == 5
    assert (config.hidden_size, config.n_routed_experts, config.moe_intermediate_size) == (4096, 288, 2048)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    arguments = ["bench", "engine", str(embedded_model()), "--batch", "1", "--context", "40", "--steps", "1"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "engine.json")])
    assert result.exit_code == 0, result.output
    assert "Decode steps" in result.output
    assert json.loads((tmp_path / "engine.json").read_text())["decode"][0]["batch"] == 1


def test_what_cannot_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", str(tmp_path)])
    assert result.exit_code == 1
    assert "the folder has no files" in result.output and "Traceback" not in result.output
