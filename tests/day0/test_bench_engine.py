"""Steps of the engine are timed on a real small model, and the preset has the shapes it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from day0.bench.engine import PRESETS, EngineOptions, EngineRow, bench_engine
from day0.cli import app
from day0.embedded import embedded_model


def test_batches_are_timed_one_after_the_other() -> None:
    told: list[EngineRow] = []
    options = EngineOptions(str(embedded_model()), batches=(1, 2), context_tokens=70, steps=2, max_batch_tokens=256)
    result = bench_engine(options, told.append)
    assert [row.batch for row in told] == [1, 2] == [row["batch"] for row in result["rows"]]
    for row in told:
        assert 0 < row.schedule_ms < row.decode_ms and row.prefill_seconds > 0
        assert row.decode_tokens_per_second == pytest.approx(row.batch / row.decode_ms * 1e3)
        assert row.prefill_tokens_per_second == pytest.approx(row.batch * 70 / row.prefill_seconds)
    assert result["operator_backends"]["sparse_mla_decode"] == "reference"


def test_the_preset_is_the_slice_it_says() -> None:
    config = PRESETS["glm-5.3-flash-8-layers"]().text_config
    assert list(config.layer_types).count("linear_attention") == 6 and len(config.layer_types) == 8
    assert list(config.mlp_layer_types).count("sparse") == 5
    assert (config.hidden_size, config.n_routed_experts, config.moe_intermediate_size) == (4096, 288, 2048)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    arguments = ["bench", "engine", str(embedded_model()), "--batch", "1", "--context", "40", "--steps", "1"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "engine.json")])
    assert result.exit_code == 0, result.output
    assert "decode" in result.output
    assert json.loads((tmp_path / "engine.json").read_text())["rows"][0]["batch"] == 1


def test_what_cannot_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", str(tmp_path)])
    assert result.exit_code == 1
    assert "the folder has no files" in result.output and "Traceback" not in result.output
