"""Latencies and rates as `vllm bench serve` defines them, on times known in advance."""

from __future__ import annotations

import numpy as np
import pytest

from day0.bench.load import Outcome, arrival_seconds
from day0.bench.summary import details, percentile, summarise
from day0.client import Answer
from protos.common.v1 import common_pb2


def outcome(sent: float, times: list[tuple[float, int]], prompt: int = 10) -> Outcome:
    usage = common_pb2.Usage(prompt_tokens=prompt, cached_tokens=4, visual_tokens=2)
    # The stream's end comes after the last token and is no part of any latency.
    return Outcome(Answer(sent_seconds=sent, token_times=times, usage=usage, finished_seconds=times[-1][0] + 50))


# TTFT 100 ms, then gaps of 20 and 40 ms; TTFT 300 ms and nothing after.
SLOWING = outcome(5.0, [(5.1, 1), (5.12, 1), (5.16, 1)])
SINGLE = outcome(5.0, [(5.3, 1)], prompt=30)


def test_figures() -> None:
    result = summarise([SLOWING, SINGLE, Outcome(None, "UNAVAILABLE: x")], 2.0, percentiles=(50, 99))
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 4)
    assert (result["total_cached_tokens"], result["total_visual_tokens"]) == (8, 4)
    rates = (result["request_throughput"], result["output_throughput"], result["total_token_throughput"])
    assert rates == (1.0, 2.0, 22.0)
    expected = {
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "std_ttft_ms": 100.0,
        "p99_ttft_ms": 298.0,
        "mean_tpot_ms": 30.0,
        "p99_tpot_ms": 30.0,
        "mean_itl_ms": 30.0,
        "p50_itl_ms": 30.0,
        "p99_itl_ms": 39.8,
        "mean_e2el_ms": 230.0,
    }
    assert {key: result[key] for key in expected} == pytest.approx(expected)


def test_a_delta_of_several_tokens_is_one_gap_and_counts_fully() -> None:
    result = summarise([outcome(0.0, [(1.0, 1), (2.0, 4)])], 1.0)
    assert result["mean_itl_ms"] == pytest.approx(1000) and result["mean_tpot_ms"] == pytest.approx(250)


def test_without_an_answer_there_are_no_latencies() -> None:
    result = summarise([Outcome(None, "x")], 1.0)
    assert result["completed"] == 0 and result["mean_ttft_ms"] is None and result["p99_tpot_ms"] is None


@pytest.mark.parametrize(
    ("limits", "good"), [({"ttft": 150}, 1), ({"ttft": 300.1}, 2), ({"ttft": 301, "tpot": 29}, 1), ({"e2el": 1}, 0)]
)
def test_goodput(limits: dict[str, float], good: int) -> None:
    assert summarise([SLOWING, SINGLE], 2.0, goodput_ms=limits)["request_goodput"] == good / 2


@pytest.mark.parametrize("percent", [0, 37.5, 50, 99, 100])
def test_percentile_is_numpys(percent: float) -> None:
    values = [5.0, 1.0, 9.0, 2.5, 7.0]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_details_keep_the_order() -> None:
    found = details([SLOWING, Outcome(None, "broken"), SINGLE])
    assert found["input_lens"] == [10, 0, 30] and found["output_lens"] == [3, 0, 1]
    assert found["errors"] == ["", "broken", ""]


def test_arrivals() -> None:
    assert arrival_seconds(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    poisson, even = (arrival_seconds(4001, 50.0, burstiness, 3) for burstiness in (1.0, 100.0))
    for arrivals in (poisson, even):
        assert arrivals[0] == 0.0 and arrivals[-1] == pytest.approx(80, rel=0.1)
    assert np.std(np.diff(poisson)) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(np.diff(even)) == pytest.approx(0.1 / 50, rel=0.1)
    assert poisson == arrival_seconds(4001, 50.0, 1.0, 3) != arrival_seconds(4001, 50.0, 1.0, 4)
