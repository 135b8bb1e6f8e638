"""`day0 parity` holds on a sound model and names the part that was broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from day0.align.tap import Verdict
from day0.cli import run
from day0.parity.in_process import Answer
from day0.parity.ways import WAYS, Parity, Workbench, measure_parity
from llm_svc.cache import prefix
from llm_svc.cache.storage import RecurrentLayerCache
from llm_svc.core import Prompt
from llm_svc.scheduler import Scheduler


@pytest.fixture(scope="module")
def bench(tiny_checkpoint: Path) -> Iterator[Workbench]:
    torch.set_num_threads(1)
    yield Workbench(tiny_checkpoint, "float32", "cpu")


def wrong(found: Parity) -> set[str]:
    return {result.part for result in found.results if not result.verdict.passes}


def test_every_way_gives_the_same_answers(bench: Workbench) -> None:
    found = measure_parity(bench)
    assert found.holds, found.results
    *bits, stepped = found.results
    assert len(bits) == 7 and {result.verdict for result in bits} == {Verdict.EQUAL}
    assert stepped.way == "token by token" and stepped.error < stepped.tolerance < 1e-3


def test_an_image_missing_from_the_prefix_key_is_named(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_images", lambda prompt, start, end: b"")
    ways = ("another picture at the same ids", "state restored inside another prompt")
    assert wrong(measure_parity(bench, ways=ways)) == {"prefix key (image digest)"}


def test_a_state_that_is_not_restored_is_named(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentLayerCache, "restore", lambda self, slot, snapshot: self.clear(slot))
    ways = ("chunks of 53 tokens", "prefix hit", "state restored inside another prompt")
    assert wrong(measure_parity(bench, ways=ways)) == {"prefix cache", "state snapshots"}


def test_an_answer_cut_short_is_no_parity(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Workbench.ask
    asked: list[object] = []

    def short(self: Workbench, scheduler: Scheduler, *groups: dict[str, Prompt]) -> dict[str, Answer]:
        found = ask(self, scheduler, *groups)
        asked.append(scheduler)
        if len(asked) > 1:
            found["beginning"].rows.pop()
        return found

    monkeypatch.setattr(Workbench, "ask", short)
    assert wrong(measure_parity(bench, ways=("batch of neighbours",))) == {"independence of neighbours"}


def test_the_command_writes_json_and_fails_where_a_way_was_not_taken(
    bench: Workbench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr("day0.parity.command.Workbench", lambda folder, dtype, device: bench)
    for way in WAYS.keys() - {"prefix hit", "batch of neighbours"}:
        monkeypatch.delitem(WAYS, way)
    monkeypatch.setattr("llm_svc.scheduler.Scheduler._longest_prefix", lambda self, sequence: ([], None))
    assert run(["parity", str(bench.folder), "--json", "--markdown", str(page)], {}) == 1
    document = json.loads(capsys.readouterr().out)
    verdicts = {result["way"]: result["verdict"] for result in document["results"]}
    assert verdicts["prefix hit"] == "unseen" and verdicts["batch of neighbours"] == "equal"
    assert not document["holds"]
    assert "was not taken" in page.read_text()
