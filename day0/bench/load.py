"""Sends the requests of a benchmark at their times and keeps what came back; knows no statistics."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from day0.client import Answer, RouterClient
from protos.router.v1 import router_pb2
from svc_common.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended: with an answer, or with an error in words."""

    answer: Answer | None
    error: str = ""


def arrival_seconds(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent, from the start; an infinite rate (requests a second) sends all at once.

    Gaps follow a gamma distribution of shape `burstiness` with mean 1 / rate: 1 is a Poisson process, less is burstier,
    more is more even (as `vllm bench serve` draws them).
    """
    if math.isinf(request_rate):
        return [0.0] * count
    chance = random.Random(seed)
    gaps = [chance.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in range(count - 1)]
    return list(itertools.accumulate(gaps, initial=0.0))[:count]


async def send_all(
    client: RouterClient,
    requests: Sequence[router_pb2.GenerateRequest],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    timeout_seconds: float | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """The outcomes in the order of the requests, and the seconds from the start to the last end.

    A request's own time starts when it is sent, after its place among `max_concurrency` came free.
    """
    places = asyncio.Semaphore(len(requests) if max_concurrency is None else max_concurrency)
    start = time.monotonic()

    async def send(request: router_pb2.GenerateRequest, at_seconds: float) -> Outcome:
        await asyncio.sleep(start + at_seconds - time.monotonic())
        async with places:
            outcome = await _ask(client, request, timeout_seconds)
        on_end(outcome)
        return outcome

    sends = [asyncio.create_task(send(*pair)) for pair in zip(requests, arrivals, strict=True)]
    try:
        outcomes = await asyncio.gather(*sends)
    finally:
        for task in sends:
            task.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
    return outcomes, time.monotonic() - start


async def _ask(client: RouterClient, request: router_pb2.GenerateRequest, timeout_seconds: float | None) -> Outcome:
    try:
        answer = await client.ask(request, timeout_seconds=timeout_seconds)
    except ServiceError as error:
        return Outcome(None, f"{error.status.name}: {error.message}")
    if answer.usage is None or not answer.token_times:
        return Outcome(None, "the stream ended without tokens or usage")
    return Outcome(answer)
