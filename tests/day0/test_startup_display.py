"""What a start looks like in a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from day0.startup_display import StartupDisplay
from protos.common.v1 import common_pb2

GB = 10**9


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def loading(percent: float, **fields: float) -> common_pb2.StartupProgress:
    return common_pb2.StartupProgress(
        stage="load", loaded_bytes=int(percent * GB), expected_bytes=100 * GB, bytes_per_second=2 * GB, **fields
    )


def stage(name: str) -> common_pb2.StartupProgress:
    return common_pb2.StartupProgress(stage=name, loaded_bytes=100 * GB, expected_bytes=100 * GB, seconds_left=0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_file_gets_a_line_for_each_change_and_each_tenth_of_the_bytes(clock: Clock) -> None:
    out = io.StringIO()
    display = StartupDisplay(Console(file=out, width=200), ["llm"], clock=clock)
    with display:
        display.show_state("llm", "starting")
        display.show_progress("llm", common_pb2.StartupProgress(stage="manifest"))
        display.show_progress("llm", common_pb2.StartupProgress(stage="manifest"))
        for percent in (0, 1, 9.99, 10, 11, 19, 35, 39, 100):
            clock.now += 1
            display.show_progress("llm", loading(percent, seconds_left=(100 - percent) / 2))
        for name in ("verify", "warm_up", "ready"):
            display.show_progress("llm", stage(name))
        display.show_state("llm", "ready")
    assert out.getvalue().splitlines() == [
        "llm: starting after 0.0 s",
        "llm: manifest after 0.0 s",
        "llm: load 0 % (0 bytes of 100.0 GB, 2.0 GB/s, 50 s left) after 1.0 s",
        "llm: load 10 % (10.0 GB of 100.0 GB, 2.0 GB/s, 45 s left) after 4.0 s",
        "llm: load 35 % (35.0 GB of 100.0 GB, 2.0 GB/s, 32 s left) after 7.0 s",
        "llm: load 100 % (100.0 GB of 100.0 GB, 2.0 GB/s, 0 s left) after 9.0 s",
        "llm: verify after 9.0 s",
        "llm: warm_up after 9.0 s",
        "llm: ready after 9.0 s",
    ]


def test_a_slow_load_is_told_of_every_ten_seconds(clock: Clock) -> None:
    out = io.StringIO()
    display = StartupDisplay(Console(file=out, width=200), ["llm", "vision"], clock=clock)
    for _ in range(21):
        clock.now += 1
        display.show_progress("llm", loading(3))
        display.show_progress("vision", loading(4))
    lines = out.getvalue().splitlines()
    for name in ("llm", "vision"):
        times = [re.findall(r"after (\S+) s", line)[0] for line in lines if line.startswith(name)]
        assert times == ["1.0", "11.0", "21.0"]
    assert "left" not in out.getvalue(), "a time that is not known is not told"


def test_a_terminal_gets_one_line_a_service_with_a_bar(clock: Clock) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, legacy_windows=False)
    display = StartupDisplay(console, ["vision", "llm", "router"], clock=clock)
    with display:
        display.show_state("llm", "starting")
        display.show_progress("llm", loading(25, seconds_left=37))
        display.show_progress("vision", stage("warm_up"))
        display.show_state("router", "ready")
        display._bars.refresh()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()[-3:]
    vision, llm, router = shown
    assert "load" in llm and "25.0 GB of 100.0 GB, 2.0 GB/s, 37 s left" in llm
    assert 5 <= llm.count("━") + llm.count("╸") <= 24
    assert "warm_up" in vision and "✓" not in vision, "all bytes are there, and it is not ready"
    assert "ready" in router and "✓" in router
    assert " after " not in out.getvalue()
