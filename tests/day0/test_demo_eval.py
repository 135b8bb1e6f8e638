"""Held-out sets and the scores counted over them."""

from __future__ import annotations

import base64
import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from day0.cli import run
from day0.demo_eval import demo_eval, evaluate
from day0.heldout import HeldOutError, read_held_out
from svc_common.errors import ServiceError

PICTURE = b"\x89PNG any bytes"


def write_set(path: Path, examples: list[dict], tasks: list[dict] | None = None) -> Path:
    tasks = tasks or [
        {"name": "capitals", "title": "Capitals", "must_reach": 0.6},
        {"name": "other", "title": "Other", "must_reach": None},
    ]
    lines = [{"tasks": tasks}, *examples]
    path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def example(task: str, answer: str, *, question: str = "Which?") -> dict:
    parts = [{"png": base64.b64encode(PICTURE).decode()}, {"text": question}]
    return {"task": task, "answer": answer, "messages": [["user", parts]]}


# What the scripted router says, stripped.
SAID = "Paris is it\x1b[31m."


async def test_right_answers_are_counted_by_task(router, tmp_path: Path) -> None:
    examples = [example("capitals", SAID), example("capitals", "Rome."), example("other", SAID)]
    held_out = read_held_out(write_set(tmp_path / "set.jsonl.xz", examples))
    capitals, other = await evaluate(router.target, held_out, concurrency=2)
    assert (capitals.right, capitals.asked, capitals.reached) == (1, 2, False)
    assert capitals.wrong == [("Rome.", SAID)]
    assert (other.right, other.asked, other.reached) == (1, 1, True)
    request = router.requests[0]
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0
    assert request.chat.messages[0].parts[0].image.data == PICTURE


async def test_an_earlier_turn_goes_along(router, tmp_path: Path) -> None:
    turns = [
        ["user", [{"text": "First?"}]],
        ["assistant", [{"text": "One."}]],
        ["user", [{"text": "And then?"}]],
    ]
    line = {"task": "other", "answer": SAID, "messages": turns}
    await evaluate(router.target, read_held_out(write_set(tmp_path / "set.jsonl.xz", [line])), concurrency=1)
    assert [message.role for message in router.requests[0].chat.messages] == [2, 3, 2]


async def test_the_document_and_the_verdict(router, tmp_path: Path, capsys) -> None:
    held_out = read_held_out(write_set(tmp_path / "set.jsonl.xz", [example("capitals", SAID)] * 3))
    options = {"concurrency": 2, "show_wrong": 1}
    assert await demo_eval(router.target, held_out, Console(stderr=True), **options, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["tasks"][0] | {"wrong": []} == {
        "name": "capitals",
        "right": 3,
        "asked": 3,
        "score": 1.0,
        "must_reach": 0.6,
        "reached": True,
        "wrong": [],
    }
    below = read_held_out(write_set(tmp_path / "set.jsonl.xz", [example("capitals", "Rome.")]))
    assert not await demo_eval(router.target, below, Console(stderr=True), **options, as_json=False)
    shown = capsys.readouterr().out
    assert "below" in shown and "Rome." in shown and "\x1b[31m" not in shown


async def test_a_failed_request_fails_the_evaluation(router, tmp_path: Path) -> None:
    lines = [example("capitals", SAID), example("other", SAID, question="refuse")]
    held_out = read_held_out(write_set(tmp_path / "set.jsonl.xz", lines))
    with pytest.raises(ServiceError, match="max_tokens: too large"):
        await evaluate(router.target, held_out, concurrency=1)


def test_tasks_and_their_number_can_be_chosen(tmp_path: Path) -> None:
    lines = [example("capitals", str(number)) for number in range(5)] + [example("other", "x")]
    held_out = read_held_out(write_set(tmp_path / "set.jsonl.xz", lines))
    chosen = held_out.choose(["capitals"], 2)
    assert [found.answer for found in chosen.examples] == ["0", "1"]
    assert len(held_out.choose([], 0).examples) == 6
    with pytest.raises(HeldOutError, match="sums is not among capitals, other"):
        held_out.choose(["sums"], 0)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"task": "sums", "answer": "", "messages": []}, "line 2: .*task 'sums'"),
        ({"task": "other", "answer": "", "messages": [["tool", []]]}, "line 2: .*role 'tool'"),
        ({"task": "other", "answer": "", "messages": [["user", [{"png": "?"}]]]}, "line 2: .*base64"),
        ({"task": "other"}, "line 2: .*messages"),
    ],
)
def test_a_broken_set_is_refused(tmp_path: Path, broken: dict, named: str) -> None:
    with pytest.raises(HeldOutError, match=named):
        read_held_out(write_set(tmp_path / "set.jsonl.xz", [broken]))


def test_a_file_of_another_kind_ends_the_command(tmp_path: Path, capsys) -> None:
    path = tmp_path / "set.jsonl.xz"
    path.write_bytes(b"not a set")
    assert run(["demo-eval", "--examples", str(path), "--target", "127.0.0.1:1"], {}) == 2
    assert str(path) in capsys.readouterr().err


def test_a_signal_stops_the_services_it_started(tmp_path: Path) -> None:
    held_out = write_set(tmp_path / "set.jsonl.xz", [example("capitals", SAID)])
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "day0", "demo-eval", "--examples", str(held_out)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"},
        text=True,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert any(line.startswith("llm: starting") for line in process.stderr)
    services = psutil.Process(process.pid).children(recursive=True)
    assert services
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == 143
    assert not psutil.wait_procs(services, timeout=10)[1]
