"""What a start says of itself at each moment, on a clock that the test moves."""

from __future__ import annotations

import logging
import math
import re
import threading

import pytest

from svc_common.metrics import EngineMetrics, LoadingMetrics, VisionMetrics
from svc_common.startup import RATE_WINDOW_SECONDS, STAGES, Startup, StartupStopped


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def startup(clock: Clock) -> Startup:
    return Startup(clock)


def test_bytes_lead_from_manifest_through_load_to_verify(startup: Startup) -> None:
    seen = [startup.stage]
    startup.enter("manifest")
    for loaded in (0, 40, 99, 100):
        startup.show_bytes(loaded, 100)
        seen.append(startup.stage)
    startup.show_bytes(100, 100)
    startup.enter("warm_up")
    startup.enter("ready")
    assert [*seen, startup.stage] == ["resolve", "load", "load", "load", "verify", "ready"]


def test_no_stage_is_entered_again_or_out_of_order(startup: Startup) -> None:
    startup.enter("warm_up")
    startup.enter("warm_up")
    for stage in ("load", "resolve", "nearly"):
        with pytest.raises((AssertionError, ValueError)):
            startup.enter(stage)
    startup.enter("ready")
    with pytest.raises(AssertionError):
        startup.fail()


def test_every_change_is_logged_once(startup: Startup, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    startup.enter("manifest")
    clock.now += 2
    startup.show_bytes(0, 10)
    startup.show_bytes(5, 10)
    startup.fail()
    told = [(record.getMessage(), record.elapsed_seconds, record.loaded_bytes) for record in caplog.records]
    assert told == [("startup stage: manifest", 0, 0), ("startup stage: load", 2, 0), ("startup stage: failed", 2, 5)]


def test_rate_and_time_left_are_those_of_the_last_seconds(startup: Startup, clock: Clock) -> None:
    startup.show_bytes(0, 10_000)
    told = startup.snapshot()
    assert (told.bytes_per_second, told.HasField("seconds_left")) == (0, False), "one moment is no rate"
    for second in range(1, 5):
        clock.now += 1
        startup.show_bytes(100 * second, 10_000)
    told = startup.snapshot()
    assert (told.bytes_per_second, told.seconds_left, told.elapsed_seconds) == (100, 96, 4)
    for second in range(1, 9):
        clock.now += 1
        startup.show_bytes(400 + 1000 * second, 10_000)
    told = startup.snapshot()
    assert told.bytes_per_second == 1000, "the slow beginning has left the window"
    assert told.seconds_left == pytest.approx((10_000 - 8400) / 1000)


def test_a_standstill_ends_the_rate(startup: Startup, clock: Clock) -> None:
    startup.show_bytes(0, 10_000)
    clock.now += 1
    startup.show_bytes(1000, 10_000)
    assert startup.snapshot().bytes_per_second == 1000
    clock.now += 3
    assert startup.snapshot().bytes_per_second == 250
    clock.now += RATE_WINDOW_SECONDS
    told = startup.snapshot()
    assert (told.bytes_per_second, told.HasField("seconds_left")) == (0, False)


def test_many_small_pieces_keep_few_samples(startup: Startup, clock: Clock) -> None:
    for piece in range(100_000):
        clock.now += 0.001
        startup.show_bytes(piece, 1_000_000)
    assert startup.snapshot().bytes_per_second == pytest.approx(1000, rel=0.05)
    assert len(startup._samples) <= RATE_WINDOW_SECONDS / 0.1 + 2


def test_after_the_last_byte_nothing_is_left_and_there_is_no_rate(startup: Startup, clock: Clock) -> None:
    startup.show_bytes(0, 100)
    clock.now += 1
    startup.show_bytes(100, 100)
    for stage in ("verify", "warm_up", "ready"):
        startup.enter(stage)
        told = startup.snapshot()
        assert (told.stage, told.loaded_bytes, told.expected_bytes) == (stage, 100, 100)
        assert (told.bytes_per_second, told.HasField("seconds_left"), told.seconds_left) == (0, True, 0)


def test_nothing_to_read_is_read_at_once(startup: Startup) -> None:
    startup.show_bytes(0, 0)
    assert startup.stage == "verify"


def test_a_call_that_comes_too_early_hears_stage_and_share(startup: Startup) -> None:
    assert startup.unavailable("the x service").message == "the x service is starting: stage resolve"
    startup.show_bytes(399, 1000)
    error = startup.unavailable("the x service")
    assert (error.message, error.reason) == ("the x service is starting: stage load, 39 % of 1000 bytes", "LOADING")
    startup.fail()
    error = startup.unavailable("the x service")
    assert (error.message, error.reason) == ("the x service could not start: it failed in stage load", "START_FAILED")
    assert not startup.snapshot().HasField("seconds_left")


def test_told_to_stop_it_ends_the_reading(startup: Startup) -> None:
    startup.show_bytes(1, 10)
    startup.stop()
    with pytest.raises(StartupStopped, match="after 2 of 10 bytes"):
        startup.show_bytes(2, 10)
    assert startup.snapshot().loaded_bytes == 1


def test_read_by_many_threads_while_it_goes_on() -> None:
    startup, go_on, faults = Startup(), threading.Event(), []

    def read() -> None:
        while not go_on.is_set():
            told = startup.snapshot()
            if told.loaded_bytes > told.expected_bytes or told.stage not in STAGES:
                faults.append(told)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for loaded in range(0, 20_001):
        startup.show_bytes(loaded, 20_000)
    go_on.set()
    for reader in readers:
        reader.join()
    assert not faults and startup.stage == "verify"


@pytest.mark.parametrize("kind", [EngineMetrics, VisionMetrics])
def test_metrics_follow_it(kind: type[LoadingMetrics], startup: Startup, clock: Clock) -> None:
    metrics = kind()
    metrics.follow(startup)

    def scrape() -> dict[str, float]:
        lines = [line for line in metrics.text().splitlines() if not line.startswith("#")]
        return {key.removeprefix("day0_"): float(text) for key, text in (line.rsplit(" ", 1) for line in lines)}

    def stages(scraped: dict[str, float]) -> list[str]:
        return [key for key, number in scraped.items() if key.startswith("startup_stage") and number == 1]

    seen = scrape()
    assert stages(seen) == ['startup_stage{stage="resolve"}'] and math.isnan(seen["startup_seconds_left"])
    startup.show_bytes(0, 1000)
    clock.now += 2
    startup.show_bytes(500, 1000)
    seen = scrape()
    assert stages(seen) == ['startup_stage{stage="load"}']
    names = ("weight_load_bytes", "weight_load_expected_bytes", "weight_load_bytes_per_second", "startup_seconds_left")
    assert [seen[name] for name in names] == [500, 1000, 250, 2]
    startup.fail()
    assert stages(scrape()) == ['startup_stage{stage="failed"}']
    assert len(re.findall(r"day0_startup_stage\{", metrics.text())) == len(STAGES)
