"""Device times by graph replay and the ceilings they are held against; it knows no operator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# More than any Hopper's; sets that together hold three times as much are not found there again.
L2_BYTES = 60e6
MOST_SETS = 64
# Device time spent on the median of one line.
BUDGET_MS = 60.0
MATRIX = 8192

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device reaches on random data; floors stand on `copy` and the matrix rates."""

    copy_bytes_per_second: float
    read_bytes_per_second: float
    bf16_flops_per_second: float
    fp8_flops_per_second: float


def sets_for(size_bytes: float) -> int:
    """How many sets of inputs of this size do not stay in L2 when they are used in turn."""
    return min(MOST_SETS, max(1, math.ceil(3 * L2_BYTES / max(size_bytes, 1))))


def _milliseconds(call: Call, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def _repeats(once_ms: float) -> int:
    return int(min(30, max(3, BUDGET_MS / max(once_ms, 1e-3))))


def median_us(calls: Sequence[Call]) -> float:
    """Median device time of one call in microseconds, from replays of a graph that makes all calls in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    estimate = min(_milliseconds(calls[0], 2))
    count = max(len(calls), min(64, math.ceil(0.2 / max(estimate, 1e-3))))
    count = math.ceil(count / len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    once = _milliseconds(graph.replay, 1)[0]
    median = statistics.median(_milliseconds(graph.replay, _repeats(once))) * 1e3 / count
    graph.reset()
    return median


def eager_median_us(calls: Sequence[Call]) -> float:
    """The same of plain calls, each behind a pause of the device that hides the host; for what no graph takes."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for i in range(_repeats(min(_milliseconds(calls[0], 2)))):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(3_000_000)
        begin.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3


def copy_bytes_per_second() -> float:
    """Bytes read and written a second by the faster of a copy kernel and a memory copy, over 4 GiB each way."""
    source = torch.randint(-(1 << 31), 1 << 31, (1 << 30,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4
    best = math.inf
    for call in (lambda: torch.bitwise_not(source, out=target), lambda: target.copy_(source)):
        call()
        best = min(best, statistics.median(_milliseconds(call, 7)))
    return moved / best * 1e3


def read_bytes_per_second() -> float:
    """Bytes a second that a reduction over 4 GiB reads."""
    source = torch.randn(1 << 30, device="cuda").view(-1, 4096)
    call = lambda: torch.amax(source, 1)  # noqa: E731
    call()
    return source.numel() * 4 / statistics.median(_milliseconds(call, 7)) * 1e3


def matrix_flops_per_second() -> tuple[float, float]:
    """Rates of torch's own products of 8192 x 8192 random matrices in bfloat16 and, with a scale a row, in e4m3."""
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").bfloat16() for _ in range(2))
    narrow_a, narrow_b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    rows = torch.ones(MATRIX, 1, device="cuda")
    products: tuple[Call, Call] = (
        lambda: a @ b,
        lambda: torch._scaled_mm(
            narrow_a, narrow_b, scale_a=rows, scale_b=rows.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        ),
    )
    bf16, fp8 = (2 * MATRIX**3 / (median_us([call]) * 1e-6) for call in products)
    return bf16, fp8


def measure_ceilings() -> Ceilings:
    """All four, on the current device; about two seconds and 9 GB."""
    copy, read = copy_bytes_per_second(), read_bytes_per_second()
    torch.cuda.empty_cache()
    return Ceilings(copy, read, *matrix_flops_per_second())


def poison(size_bytes: int) -> None:
    """Leaves NaN in free memory, so that an output nobody wrote shows."""
    held = torch.full((size_bytes // 4,), math.nan, device="cuda")
    del held
