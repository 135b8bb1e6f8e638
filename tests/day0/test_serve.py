"""`day0 serve` as a user runs it: real processes, a real checkpoint, signals and deaths."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.s3_double import BUCKET, PREFIX
from tests.services.store import environment_of, filled
from training.demo.photograph import draw_photograph

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    "DAY0_LLM_THREADS": "1",
}


def day0(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "day0", *arguments]


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process of `day0 serve --json`, ready, and its endpoints by service; gone afterwards, children included."""
    process = subprocess.Popen(
        day0("serve", *arguments, "--port", "0", "--json"),
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children: list[psutil.Process] = []
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        services = {entry["service"]: entry for entry in json.loads(line)["services"]}
        children = [psutil.Process(entry["pid"]) for entry in services.values()]
        yield process, services
    finally:
        process.kill()
        process.communicate()
        for child in children:
            if child.is_running():
                child.kill()


def ask(target: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        day0("chat", *arguments, "--json", "--target", target),
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow
def test_serves_pictures_and_ends_on_sigterm(tiny_checkpoint: Path, tmp_path: Path) -> None:
    picture = tmp_path / "photograph.jpg"
    picture.write_bytes(draw_photograph())
    with serving(str(tiny_checkpoint), "--log-dir", str(tmp_path), "--name", "tiny") as (process, services):
        assert list(services) == ["vision", "llm", "router"]
        assert len({entry["pid"] for entry in services.values()} | {process.pid}) == 4
        target = services["router"]["target"]
        plain = ask(target, "What is this?", "--max-tokens", "12")
        seen = ask(target, "What is this?", "--image", str(picture), "--max-tokens", "12")
        assert (plain["completion_tokens"], plain["visual_tokens"]) == (12, 0)
        assert seen["visual_tokens"] == 63
        assert seen["token_ids"] != plain["token_ids"]
        pids = [entry["pid"] for entry in services.values()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        for entry in services.values():
            assert Path(entry["log"]).stat().st_size > 0
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == "", "one line of JSON and nothing else"
        told = process.stderr.read().splitlines()
        for name in services:
            stages = [line.split()[1] for line in told if line.startswith(f"{name}: ")]
            assert (stages[0], stages[-1]) == ("starting", "ready")
            assert set(stages[1:-1]) <= {"resolve", "manifest", "load", "verify", "warm_up"}


def test_progress_of_the_weights_is_told_while_they_come(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Lines on standard error while half of the bytes are held back, and then nothing but JSON on standard output."""
    double = filled(Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")))
    double.act_of = lambda name, start: "withhold" if name.endswith(".safetensors") and start > 100_000 else None
    command = day0("serve", f"s3://{BUCKET}/{PREFIX}", "--only", "vision", "--port", "0", "--json")
    process = subprocess.Popen(
        [*command, "--set", "vision.load_budget_bytes=60000", "--log-dir", str(tmp_path)],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment_of(double)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # What never says a word would be waited for without end: no bytes, no readiness.
    too_late = threading.Timer(120, process.terminate)
    too_late.start()
    try:
        assert process.stdout is not None and process.stderr is not None
        told = next((line for line in process.stderr if line.startswith("vision: load ")), "it has ended")
        assert re.match(r"vision: load \d+ % \([\d.]+ \w+ of 816\.1 kB\b.*\) after [\d.]+ s$", told), told
        double.release.set()
        assert json.loads(process.stdout.readline())["event"] == "ready"
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, "")
        assert "vision: ready after " in errors
    finally:
        too_late.cancel()
        double.stop()
        # Its children end with it, unless it is killed.
        process.terminate()
        process.communicate()


def test_a_death_is_told_and_ends_the_rest(tmp_path: Path) -> None:
    with serving("--only", "router", "--llm-target", "127.0.0.1:1", "--log-dir", str(tmp_path)) as (process, services):
        os.kill(services["router"]["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "the router service was ended by SIGKILL" in errors
        assert "router listens" in errors, "the end of the log is shown"


def test_a_bad_setting_is_told_by_its_name() -> None:
    done = subprocess.run(
        day0("serve", "--only", "router", "--llm-target", "127.0.0.1:1", "--set", "router.max_imagez=1", "--port", "0"),
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "the router service ended with status 2" in done.stderr
    assert "DAY0_ROUTER_MAX_IMAGEZ" in done.stderr


def test_a_missing_checkpoint_starts_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        day0("serve", str(tmp_path)), cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "it does not exist" in done.stderr and "starting" not in done.stderr
