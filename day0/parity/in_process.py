"""The real engine, scheduler and runner in this process, answering greedily; keeps every logit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llm_svc.core import Batch, Prompt, PromptTokens, Request, SamplingParams
from llm_svc.core import Sequence as RunningSequence
from llm_svc.detokenizer import Detokenizer
from llm_svc.engine import Engine
from llm_svc.model_runner import Runner
from llm_svc.observe import EngineObserver
from llm_svc.output import FailureEvent, OutputChannel, UsageEvent
from llm_svc.sampler import Sampler
from llm_svc.scheduler import Scheduler
from svc_common.health import StepAge
from svc_common.metrics import EngineMetrics


@dataclass(slots=True)
class Answer:
    """What one prompt got: logits float32 [vocab_size] before each token, the tokens, and its cached tokens."""

    rows: list[Tensor] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def logits(self) -> Tensor:
        """[tokens, vocab_size]."""
        return torch.stack(self.rows)

    @property
    def ids(self) -> list[int]:
        """The greedy choice."""
        return [int(row.argmax()) for row in self.rows]


class _Recording:
    """A runner that keeps the logits of each request."""

    def __init__(self, runner: Runner, answers: dict[str, Answer]) -> None:
        self.facts, self.workspace, self.expert_counts = runner.facts, runner.workspace, runner.expert_counts
        self._runner, self._answers = runner, answers

    def run(self, batch: Batch) -> Tensor:
        logits = self._runner.run(batch)
        for item, row in zip(batch.sampled, logits, strict=True):
            # A runner may write the next step's logits to the same place.
            self._answers[item.sequence.request.request_id].rows.append(row.clone())
        return logits

    def prepare(self) -> None:
        self._runner.prepare()

    def forget(self, sequence: RunningSequence) -> None:
        self._runner.forget(sequence)


def answer(
    runner: Runner,
    scheduler: Scheduler,
    make_detokenizer: Callable[[], Detokenizer],
    groups: Sequence[dict[str, Prompt]],
    new_tokens: int,
) -> dict[str, Answer]:
    """Answers by name, `new_tokens` each; the prompts of a group run together, the groups one after the other.

    A prompt asked again replaces its answer. ServiceError where the engine gives one up.
    """
    return asyncio.run(_answer(runner, scheduler, make_detokenizer, groups, new_tokens))


async def _answer(
    runner: Runner,
    scheduler: Scheduler,
    make_detokenizer: Callable[[], Detokenizer],
    groups: Sequence[dict[str, Prompt]],
    new_tokens: int,
) -> dict[str, Answer]:
    loop = asyncio.get_running_loop()
    answers: dict[str, Answer] = {}

    def wake(channels: Sequence[OutputChannel]) -> None:
        for channel in channels:
            loop.call_soon_threadsafe(channel.wake)

    recording = _Recording(runner, answers)
    observer = EngineObserver(EngineMetrics())
    sampler = Sampler(runner.facts.vocab_size)
    engine = Engine(recording, scheduler, sampler, make_detokenizer, frozenset(), observer, StepAge(), wake)
    engine.start()
    try:
        for group in groups:
            await asyncio.gather(*(_ask(engine, answers, name, prompt, new_tokens) for name, prompt in group.items()))
    finally:
        await asyncio.to_thread(engine.stop)
    return answers


async def _ask(engine: Engine, answers: dict[str, Answer], name: str, prompt: Prompt, new_tokens: int) -> None:
    answers[name] = Answer()
    channel = OutputChannel(asyncio.get_running_loop())
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    engine.check_fits(prompt)
    engine.submit(Request(name, (PromptTokens(prompt.ids),), (), sampling), prompt, channel)
    while True:
        for event in (await channel.next_events())[0]:
            if isinstance(event, FailureEvent):
                raise event.error
            if isinstance(event, UsageEvent):
                answers[name].cached_tokens = event.cached_tokens
                return
