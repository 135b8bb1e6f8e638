"""`day0 recall` gives one where everything is chosen, and less where the choice is bad."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from day0.align.reference import AlignError
from day0.cli import run
from day0.recall import measure
from day0.recall.measure import Recall, measure_recall
from llm_svc.loading import load_model
from llm_svc.native_runner import NativeRunner

TEXT = "The river runs past the old mill, and nobody knows since when. " * 80
REACH = 64


def by_length(folder: Path, *lengths: int) -> dict[int, Recall]:
    found = measure_recall(folder, TEXT, "test", lengths, queries=8, dtype="float32", device="cpu").recalls
    assert {recall.layer for recall in found} == {3}
    return {recall.length_tokens: recall for recall in found}


def test_a_short_text_is_kept_whole_and_a_long_one_better_than_by_chance(tiny_checkpoint: Path) -> None:
    short, long = by_length(tiny_checkpoint, REACH, 300).values()
    assert (short.recall, short.queries) == (1.0, 8)
    assert short.mass == pytest.approx(1.0, abs=1e-6)
    assert REACH <= long.chosen < REACH + 4
    assert long.chance == pytest.approx(long.chosen / 297, rel=0.02)
    assert long.mass < long.best_mass < 1 and 0 < long.recall < 1


def test_the_oracle_itself_has_all_recall(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of dense attention's own best positions: what the figures are held against."""

    def figures(q: Any, keys: Any, chosen: Any, scale: float) -> Any:
        best = torch.softmax(q.float() @ keys.float().T * scale, -1).mean(0).topk(int((chosen >= 0).sum())).indices
        return sound(q, keys, best, scale)

    sound = measure._figures
    monkeypatch.setattr(measure, "_figures", figures)
    (found,) = by_length(tiny_checkpoint, 300).values()
    assert found.recall == 1.0 and found.mass == pytest.approx(found.best_mass)


def test_a_bad_choice_is_seen(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sound,) = by_length(tiny_checkpoint, 300).values()

    def negated(*args: Any, **kwargs: Any) -> Any:
        loaded = load_model(*args, **kwargs)
        assert isinstance(loaded.runner, NativeRunner)
        model = loaded.runner.model
        select = model.operators.index_select_prefill
        worst = replace(model.operators, index_select_prefill=lambda q, w, *a, **k: select(q, -w, *a, **k))
        loaded.runner.model = replace(model, operators=worst)
        return loaded

    monkeypatch.setattr(measure, "load_model", negated)
    (found,) = by_length(tiny_checkpoint, 300).values()
    assert found.recall != sound.recall and found.best_mass == pytest.approx(sound.best_mass)


def test_the_command_writes_json_and_a_plot_and_fails_below_the_least_mass(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, plot = tmp_path / "text.txt", tmp_path / "plot.png"
    text.write_text(TEXT)
    options = ["--text", str(text), "--length", "200", "--queries", "4", "--json", "--plot", str(plot)]
    assert run(["recall", str(tiny_checkpoint), *options, "--least-mass", "1.0"], {}) == 1
    (found,) = json.loads(capsys.readouterr().out)["recalls"]
    assert found["length_tokens"] == 200 and 0 < found["mass"] < 1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_text_that_is_too_short_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(AlignError, match="--length: 300 tokens, and test has"):
        measure_recall(tiny_checkpoint, "few", "test", [300], queries=1, dtype="float32", device="cpu")
