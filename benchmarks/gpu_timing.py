"""Device times by graph replay and the copy rate they are held against; it knows no operator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

L2_BYTES = 60e6
BUDGET_MS = 60.0

Call = Callable[[], Any]


def sets_for(size_bytes: float) -> int:
    """How many sets of inputs of this size do not stay in L2 when they are used in turn."""
    return min(64, max(1, math.ceil(3 * L2_BYTES / max(size_bytes, 1))))


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


def median_us(calls: Sequence[Call]) -> float:
    """Median device time of one call in microseconds, from replays of a graph that makes all calls in turn."""
    for call in calls[:3]:
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
    repeats = int(min(30, max(3, BUDGET_MS / max(once, 1e-3))))
    median = statistics.median(_milliseconds(graph.replay, repeats)) * 1e3 / count
    graph.reset()
    return median


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


def poison(size_bytes: int) -> None:
    """Leaves NaN in free memory, so that an output nobody wrote shows."""
    held = torch.full((size_bytes // 4,), math.nan, device="cuda")
    del held
