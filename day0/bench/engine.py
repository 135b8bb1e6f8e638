"""Times the engine's steps in this process, without network, tokenizer or answers: one prefill, then decode steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Glm5NextConfig, PreTrainedConfig

from day0.bench.machine import environment
from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams
from llm_svc.core import Sequence as Running
from llm_svc.loading import LoadedModel, load_model
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings

# Configs by name, whose weights are made at random: shapes of released models, cut to some layers.
PRESETS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "glm-5.3-flash-8-layers": lambda: Glm5NextConfig(text_config={"num_hidden_layers": 8}),
}
# The first steps compile kernels and fill caches of the allocator.
WARM_UP_STEPS = 3
SEED = 0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to time: `batches` sequences of `context_tokens` each, `steps` decode steps after their prefill."""

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    load_format: str = "checkpoint"
    batches: tuple[int, ...] = (1,)
    context_tokens: int = 2048
    steps: int = 20
    max_batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One batch: medians of a decode step in milliseconds, all of it and what of it was scheduling in Python.

    `prefill_tokens_per_second` is of all prompts together, `peak_bytes` the GPU's memory at its fullest (0 on a CPU).
    """

    batch: int
    context_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_ms: float
    schedule_ms: float
    decode_tokens_per_second: float
    peak_bytes: int


def bench_engine(options: EngineOptions, told: Callable[[EngineRow], None] = lambda row: None) -> dict[str, Any]:
    """Every batch in turn; `told` is called after each. Raises LoadError and ValueError for what cannot run."""
    with _folder(options) as (folder, load_format):
        model = _load(options, folder, load_format)
    rows = []
    for batch in options.batches:
        row = _time(model, options, batch)
        rows.append(row)
        told(row)
    return {
        "options": asdict(options),
        "environment": environment() | ({"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}),
        "operator_backends": dict(model.facts.operator_backends),
        "rows": [asdict(row) for row in rows],
    }


@contextmanager
def _folder(options: EngineOptions) -> Iterator[tuple[str, str]]:
    """Where the config is, and whether weights are read or made; a preset is written down for as long as it is read."""
    preset = PRESETS.get(options.model)
    if preset is None:
        yield options.model, options.load_format
        return
    with tempfile.TemporaryDirectory(prefix="day0-preset-") as folder:
        preset().save_pretrained(folder)
        yield folder, "dummy"


def _load(options: EngineOptions, folder: str, load_format: str) -> LoadedModel:
    most, block = max(options.batches), 64
    # A sequence needs blocks for what it will have at the end, and one more may be half empty.
    blocks = most * (-(-(options.context_tokens + options.steps + WARM_UP_STEPS + 1) // block) + 1)
    settings = LlmSettings(
        model=folder,
        load_format=load_format,
        device=options.device,
        dtype=options.dtype,
        tier="native",
        block_size=block,
        cache_tokens=blocks * block,
        prefix_cache=False,
        max_snapshots=0,
        max_running_sequences=most,
        max_batch_tokens=options.max_batch_tokens,
        prefill_chunk_tokens=0,
        experts_convert_tokens=0,
    )
    source = open_source(settings)
    try:
        return load_model(settings, source)
    finally:
        source.close()


def _time(model: LoadedModel, options: EngineOptions, batch: int) -> EngineRow:
    cuda = options.device == "cuda"
    generator = torch.Generator().manual_seed(SEED + batch)
    # Kernels are compiled and autotuned for these shapes by a first sequence that is thrown away.
    _prefill(model, _sequences(model, generator, options.context_tokens, 1))
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    sequences = _sequences(model, generator, options.context_tokens, batch)
    _prefill(model, sequences, keep=True)
    prefill_seconds = time.perf_counter() - began
    steps = [_step(model) for _ in range(WARM_UP_STEPS + options.steps)][WARM_UP_STEPS:]
    for sequence in sequences:
        model.scheduler.remove(sequence)
    decode_ms = statistics.median(whole for whole, _ in steps) * 1e3
    return EngineRow(
        batch=batch,
        context_tokens=options.context_tokens,
        prefill_seconds=prefill_seconds,
        prefill_tokens_per_second=batch * options.context_tokens / prefill_seconds,
        decode_ms=decode_ms,
        schedule_ms=statistics.median(scheduled for _, scheduled in steps) * 1e3,
        decode_tokens_per_second=batch / decode_ms * 1e3,
        peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
    )


def _sequences(model: LoadedModel, generator: torch.Generator, tokens: int, count: int) -> list[Running]:
    """Prompts of random ids, given to the scheduler."""
    made = []
    for number in range(count):
        ids = tuple(torch.randint(0, model.facts.vocab_size, (tokens,), generator=generator).tolist())
        params = SamplingParams(max_tokens=1 << 20)
        made.append(Running(Request(f"bench-{number}", (PromptTokens(ids),), (), params), Prompt(ids, ())))
        model.scheduler.add(made[-1])
    return made


def _prefill(model: LoadedModel, sequences: Sequence[Running], *, keep: bool = False) -> None:
    """Steps until each has its first token; without `keep` they go again."""
    while any(not sequence.output_ids for sequence in sequences):
        _step(model)
    if not keep:
        for sequence in sequences:
            model.scheduler.remove(sequence)


def _step(model: LoadedModel) -> tuple[float, float]:
    """One greedy step: seconds of all of it, the ids' way to the host included, and of its scheduling."""
    began = time.perf_counter()
    batch = model.scheduler.schedule()
    scheduled = time.perf_counter()
    chosen = model.runner.run(batch).argmax(-1).tolist()
    computed = time.perf_counter()
    sampled = [item.sequence for item in batch.items if item.samples]
    for sequence, token in zip(sampled, chosen, strict=True):
        sequence.output_ids.append(token)
    model.scheduler.finish(batch)
    ended = time.perf_counter()
    return ended - began, (scheduled - began) + (ended - computed)
