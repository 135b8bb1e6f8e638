"""Drives the steps of a loaded model by hand: prompts of random ids, prefill, greedy decode steps; times each part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams
from llm_svc.core import Sequence as Running
from llm_svc.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step: all of it, the ids' way to the host included, and of that what the host worked.

    `host` is scheduling, building and launching the forward, and taking up the ids: everything but waiting for them.
    """

    whole: float
    host: float


def random_sequences(model: LoadedModel, tokens: int, count: int, seed: int) -> list[Running]:
    """Prompts of random ids, given to the scheduler."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = tuple(torch.randint(0, model.facts.vocab_size, (tokens,), generator=generator).tolist())
        params = SamplingParams(max_tokens=1 << 20)
        made.append(Running(Request(f"bench-{number}", (PromptTokens(ids),), (), params), Prompt(ids, ())))
        model.scheduler.add(made[-1])
    return made


def prefill(model: LoadedModel, sequences: Sequence[Running]) -> float:
    """Steps until each has its first token; gives the seconds."""
    began = time.perf_counter()
    while any(not sequence.output_ids for sequence in sequences):
        step(model)
    return time.perf_counter() - began


def step(model: LoadedModel) -> StepTime:
    """One greedy step of everything that runs."""
    began = time.perf_counter()
    batch = model.scheduler.schedule()
    highest, chosen = model.runner.run(batch).max(dim=-1)
    launched = time.perf_counter()
    values, ids = highest.tolist(), chosen.tolist()
    arrived = time.perf_counter()
    for item, value, token in zip(batch.sampled, values, ids, strict=True):
        if not -float("inf") < value < float("inf"):
            raise ValueError(f"logits with a highest value of {value}: the weights cannot be run in this dtype")
        item.sequence.output_ids.append(token)
    model.scheduler.finish(batch)
    ended = time.perf_counter()
    return StepTime(ended - began, (launched - began) + (ended - arrived))


def remove(model: LoadedModel, sequences: Sequence[Running]) -> None:
    """Takes the sequences out again."""
    for sequence in sequences:
        model.scheduler.remove(sequence)
