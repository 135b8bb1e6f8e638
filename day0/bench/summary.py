"""Turns outcomes into the figures of `vllm bench serve`; knows neither services nor terminals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from day0.bench.load import Outcome
from day0.client import Answer

LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def ttft_ms(answer: Answer) -> float:
    """From sending the request to the first delta with tokens."""
    return (answer.token_times[0][0] - answer.sent_seconds) * 1000


def e2el_ms(answer: Answer) -> float:
    """From sending the request to the last delta with tokens."""
    return (answer.token_times[-1][0] - answer.sent_seconds) * 1000


def tpot_ms(answer: Answer) -> float | None:
    """(e2el - ttft) / (tokens - 1); None for a single token."""
    later = answer.completion_tokens - 1
    return (e2el_ms(answer) - ttft_ms(answer)) / later if later else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the nearest ranks, as numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(
    outcomes: Sequence[Outcome],
    duration_seconds: float,
    *,
    percentiles: Sequence[float] = (99,),
    goodput_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Counts, rates (a second) and latencies (ms) of the successful requests, under the names vLLM writes.

    A latency without a value, as TPOT where every answer has one token, is None. `goodput_ms` has limits by the names
    of LATENCIES without itl; a request that keeps all of them counts for `request_goodput`.
    """
    answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
    usages = [answer.usage for answer in answers if answer.usage is not None]
    input_tokens = sum(usage.prompt_tokens for usage in usages)
    output_tokens = sum(answer.completion_tokens for answer in answers)
    summary: dict[str, Any] = {
        "completed": len(answers),
        "failed": len(outcomes) - len(answers),
        "duration": duration_seconds,
        "total_input_tokens": input_tokens,
        "total_visual_tokens": sum(usage.visual_tokens for usage in usages),
        "total_cached_tokens": sum(usage.cached_tokens for usage in usages),
        "total_output_tokens": output_tokens,
        "request_throughput": len(answers) / duration_seconds,
        "output_throughput": output_tokens / duration_seconds,
        "total_token_throughput": (input_tokens + output_tokens) / duration_seconds,
    }
    if goodput_ms is not None:
        good = sum(_keeps(answer, goodput_ms) for answer in answers)
        summary["request_goodput"] = good / duration_seconds
    values = {
        "ttft": [ttft_ms(answer) for answer in answers],
        "tpot": [tpot for answer in answers if (tpot := tpot_ms(answer)) is not None],
        "itl": [seconds * 1000 for answer in answers for seconds in answer.itl_seconds],
        "e2el": [e2el_ms(answer) for answer in answers],
    }
    for name, measured in values.items():
        summary[f"mean_{name}_ms"] = statistics.fmean(measured) if measured else None
        summary[f"median_{name}_ms"] = statistics.median(measured) if measured else None
        summary[f"std_{name}_ms"] = statistics.pstdev(measured) if measured else None
        for percent in percentiles:
            summary[f"p{percent:g}_{name}_ms"] = percentile(measured, percent) if measured else None
    return summary


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What each request did, in the order they were made; times in seconds, as vLLM's `--save-detailed`."""
    answers = [outcome.answer for outcome in outcomes]
    return {
        "input_lens": [a.usage.prompt_tokens if a is not None and a.usage is not None else 0 for a in answers],
        "output_lens": [a.completion_tokens if a is not None else 0 for a in answers],
        "ttfts": [ttft_ms(a) / 1000 if a is not None else 0.0 for a in answers],
        "itls": [a.itl_seconds if a is not None else [] for a in answers],
        "generated_texts": [a.text if a is not None else "" for a in answers],
        "errors": [outcome.error for outcome in outcomes],
    }


def _keeps(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    measured = {"ttft": ttft_ms(answer), "tpot": tpot_ms(answer) or 0.0, "e2el": e2el_ms(answer)}
    return all(measured[name] <= limit for name, limit in limits_ms.items())
