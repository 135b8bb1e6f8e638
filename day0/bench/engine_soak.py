"""Keeps an engine busy with mixed requests, of which some are cancelled, and says whether anything grew meanwhile."""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from llm_svc.core import Batch, Prompt, PromptTokens, Request, SamplingParams
from llm_svc.core import Sequence as Running
from llm_svc.engine import Engine, EngineLoad
from llm_svc.loading import LoadedModel
from llm_svc.model_runner import Runner
from llm_svc.native_runner import NativeRunner
from llm_svc.observe import EngineObserver
from llm_svc.output import FailureEvent, OutputChannel, TokenEvent, UsageEvent
from llm_svc.sampler import Sampler
from svc_common.health import StepAge
from svc_common.metrics import EngineMetrics

SEED = 0
CANCELLED_SHARE = 0.2
SAMPLED_SHARE = 0.25
# Steps of the first and of the last part of a soak are compared.
PART = 0.25
# What a request that was asked at the very end may take; beyond it one hangs.
GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """`clients` ask one request after the other for `seconds`; lengths are drawn evenly up to the bounds."""

    seconds: float
    clients: int
    most_prompt_tokens: int
    most_new_tokens: int


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What happened, and what is left when all is over.

    `step_drift` is the median decode step of the last part to that of the first, each of the batch size that both have
    most of; 1 is steady, None where no size was seen often enough. Bytes are those in use on the GPU (on a CPU the most
    that the process had), `lost_blocks` and `lost_slots` what did not come back.
    """

    seconds: float
    finished: int
    cancelled: int
    failed: int
    decode_steps: int
    step_drift: float | None
    drift_batch: int | None
    lost_blocks: int
    lost_slots: int
    on_gpu: bool
    bytes_before: int
    bytes_after: int

    def problems(self, *, most_drift: float = 1.1, most_grown_bytes: int = 1 << 24) -> list[str]:
        """What a soak must not show, in words; empty when all is well."""
        found = []
        if self.failed:
            found.append(f"{self.failed} requests failed")
        if self.lost_blocks or self.lost_slots:
            found.append(f"{self.lost_blocks} blocks and {self.lost_slots} state slots did not come back")
        if self.step_drift is not None and self.step_drift > most_drift:
            found.append(
                f"a decode step of batch {self.drift_batch} takes {self.step_drift:.2f} times as long as at first"
            )
        grown = self.bytes_after - self.bytes_before
        if self.on_gpu and grown > most_grown_bytes:
            found.append(f"{grown:,} more bytes of the GPU's memory are in use than before")
        return found


class _NoText:
    """Stands in for a detokenizer where nobody reads."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _TimedRunner:
    """A runner that notes how long batches of decode steps alone take on the device."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.facts, self.workspace, self.expert_counts = runner.facts, runner.workspace, runner.expert_counts
        self.steps: list[tuple[float, int, float]] = []

    def run(self, batch: Batch) -> torch.Tensor:
        began = time.perf_counter()
        logits = self._runner.run(batch)
        if all(item.decodes for item in batch.items):
            if logits.is_cuda:
                torch.cuda.synchronize()
            self.steps.append((began, len(batch.items), time.perf_counter() - began))
        return logits

    def prepare(self) -> None:
        self._runner.prepare()

    def forget(self, sequence: Running) -> None:
        self._runner.forget(sequence)


def soak(model: LoadedModel, options: SoakOptions, told: Callable[[float, EngineLoad], None]) -> SoakResult:
    """Runs it; `told` gets the seconds that are over and the engine's load about once a second.

    ValueError when a request hangs.
    """
    return asyncio.run(_soak(model, options, told))


async def _soak(model: LoadedModel, options: SoakOptions, told: Callable[[float, EngineLoad], None]) -> SoakResult:
    loop = asyncio.get_running_loop()

    def wake(channels: Sequence[OutputChannel]) -> None:
        for channel in channels:
            loop.call_soon_threadsafe(channel.wake)

    runner = _TimedRunner(model.runner)
    engine = Engine(
        runner=runner,
        scheduler=model.scheduler,
        sampler=Sampler(model.facts.vocab_size),
        make_detokenizer=_NoText,  # type: ignore[arg-type]  # no text leaves this engine
        end_token_ids=frozenset(),
        observer=EngineObserver(EngineMetrics(), model.runner.expert_counts),
        step_age=StepAge(),
        wake=wake,
    )
    on_gpu = isinstance(model.runner, NativeRunner) and model.runner.model.device.type == "cuda"
    before, bytes_before = engine.load, _bytes_in_use(on_gpu)
    engine.start()
    began = time.perf_counter()
    deadline = began + options.seconds
    numbers, counts = count(), dict.fromkeys(("finished", "cancelled", "failed"), 0)
    clients = [
        asyncio.create_task(_client(engine, model, options, random.Random(SEED + c), numbers, counts, deadline))
        for c in range(options.clients)
    ]
    while not all(client.done() for client in clients):
        await asyncio.wait(clients, timeout=1.0)
        told(time.perf_counter() - began, engine.load)
        if time.perf_counter() > deadline + GRACE_SECONDS:
            hanging = sum(not client.done() for client in clients)
            for client in clients:
                client.cancel()
            raise ValueError(f"{hanging} requests have not ended {GRACE_SECONDS:.0f} s after the soak")
    await asyncio.gather(*clients)
    await asyncio.to_thread(engine.stop)
    drift, batch = _drift(runner.steps, began, time.perf_counter())
    return SoakResult(
        seconds=time.perf_counter() - began,
        **counts,
        decode_steps=len(runner.steps),
        step_drift=drift,
        drift_batch=batch,
        lost_blocks=before.free_blocks - engine.load.free_blocks,
        lost_slots=before.free_state_slots - engine.load.free_state_slots,
        on_gpu=on_gpu,
        bytes_before=bytes_before,
        bytes_after=_bytes_in_use(on_gpu),
    )


async def _client(
    engine: Engine,
    model: LoadedModel,
    options: SoakOptions,
    rng: random.Random,
    numbers: count[int],
    counts: dict[str, int],
    deadline: float,
) -> None:
    while time.perf_counter() < deadline:
        request_id = f"soak-{next(numbers)}"
        length = rng.randint(1, options.most_prompt_tokens)
        ids = tuple(rng.randrange(model.facts.vocab_size) for _ in range(length))
        sampled = rng.random() < SAMPLED_SHARE
        params = SamplingParams(
            max_tokens=rng.randint(1, options.most_new_tokens),
            temperature=0.8 if sampled else 0.0,
            seed=rng.randrange(1 << 30),
        )
        # A cancel may come before the first token, between two, or when all are there already.
        cancel_after = rng.randint(0, params.max_tokens) if rng.random() < CANCELLED_SHARE else None
        channel = OutputChannel(asyncio.get_running_loop())
        engine.submit(Request(request_id, (PromptTokens(ids),), (), params), Prompt(ids), channel)
        counts[await _outcome(engine, channel, request_id, cancel_after)] += 1


async def _outcome(engine: Engine, channel: OutputChannel, request_id: str, cancel_after: int | None) -> str:
    seen = 0
    while True:
        if cancel_after is not None and seen >= cancel_after:
            engine.abort(request_id)
            return "cancelled"
        events, was_full = await channel.next_events()
        if was_full:
            engine.nudge()
        for event in events:
            if isinstance(event, UsageEvent):
                return "finished"
            if isinstance(event, FailureEvent):
                return "failed"
            if isinstance(event, TokenEvent):
                seen += len(event.tokens)


def _drift(steps: Sequence[tuple[float, int, float]], began: float, ended: float) -> tuple[float | None, int | None]:
    """Median of the last part to that of the first, at the batch size that both have most of; it needs ten of each."""
    length = (ended - began) * PART
    parts = [
        [(batch, seconds) for at, batch, seconds in steps if at < began + length],
        [(batch, seconds) for at, batch, seconds in steps if at >= ended - length],
    ]
    by_batch: list[dict[int, list[float]]] = []
    for part in parts:
        found = defaultdict(list)
        for batch, seconds in part:
            found[batch].append(seconds)
        by_batch.append(found)
    first, last = by_batch
    common = [batch for batch in first if min(len(first[batch]), len(last.get(batch, ()))) >= 10]
    if not common:
        return None, None
    batch = max(common, key=lambda size: min(len(first[size]), len(last[size])))
    return statistics.median(last[batch]) / statistics.median(first[batch]), batch


def _bytes_in_use(on_gpu: bool) -> int:
    if on_gpu:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
