"""`day0 serve` as a user runs it: real processes, a real checkpoint, signals and deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from day0.photograph import draw_photograph

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
