"""Times the engine's steps in this process, without network, tokenizer or answers: prefills, then decode steps."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Glm5NextConfig, PreTrainedConfig

from day0.bench.engine_floor import step_bytes
from day0.bench.engine_soak import SoakOptions, SoakResult, soak
from day0.bench.engine_steps import prefill, random_sequences, remove, step
from day0.bench.machine import environment
from llm_svc.engine import EngineLoad
from llm_svc.loading import LoadedModel, load_model
from llm_svc.native_runner import NativeRunner
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings
from llm_svc.warm_up import warm_up

# Configs by name, whose weights are made at random: shapes of released models, cut to some layers.
PRESETS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "glm-5.3-flash-8-layers": lambda: Glm5NextConfig(text_config={"num_hidden_layers": 8}),
}
# The first steps compile kernels and fill caches of the allocator.
WARM_UP_STEPS = 3
SEED = 0
BLOCK_SIZE = 64
SOAK_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to time.

    Each of `contexts` with each of `batches`: so many sequences of so many tokens are prefilled, then `steps` decode
    steps are timed. Each of `prefills` is one prompt alone. `compare_upstream` has unmodified transformers do the same
    beforehand for at most `upstream_seconds`, on a GPU after which ours runs. Last comes a soak of `soak_seconds`.
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    load_format: str = "checkpoint"
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (2048,)
    prefills: tuple[int, ...] = ()
    steps: int = 20
    max_batch_tokens: int = 8192
    compare_upstream: bool = False
    upstream_seconds: float = 300.0
    soak_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Medians of a decode step in milliseconds.

    `host_ms` is what of it the host worked rather than waited. `floor_ms` is what the bytes of `step_bytes` take at the
    rate of a copy, None on a CPU. `upstream_ms` is transformers' in the same run, None without, and
    `upstream_error` why it has none.
    """

    batch: int
    context_tokens: int
    decode_ms: float
    host_ms: float
    floor_ms: float | None = None
    upstream_ms: float | None = None
    upstream_error: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.batch / self.decode_ms * 1e3


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One prompt alone; `peak_bytes` is the GPU's memory at its fullest (0 on a CPU)."""

    tokens: int
    seconds: float
    peak_bytes: int
    upstream_seconds: float | None = None
    upstream_peak_bytes: int | None = None
    upstream_error: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of the prompt."""
        return self.tokens / self.seconds


Row = DecodeRow | PrefillRow


def bench_engine(
    options: EngineOptions,
    told: Callable[[Row | SoakResult], None] = lambda row: None,
    progress: Callable[[float, EngineLoad], None] = lambda seconds, load: None,
) -> dict[str, Any]:
    """Everything in turn; `told` is called after each row, `progress` during a soak.

    Raises LoadError and ValueError for what cannot run.
    """
    with _folder(options) as (folder, load_format):
        upstream = list(_upstream(options, folder)) if options.compare_upstream else None
        copy_rate = _copy_rate(options)
        model = _load(options, folder, load_format)
    warm_up(model)
    rows: list[Row] = []
    for row in _rows(model, options, copy_rate, upstream):
        rows.append(row)
        told(row)
    soaked = None
    if options.soak_seconds:
        lengths = SoakOptions(options.soak_seconds, 2 * max(options.batches), max(options.contexts), SOAK_NEW_TOKENS)
        soaked = soak(model, lengths, progress)
        told(soaked)
    return {
        "options": asdict(options),
        "environment": environment() | ({"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}),
        "operator_backends": dict(model.facts.operator_backends),
        "copy_bytes_per_second": copy_rate,
        "upstream": upstream,
        "decode": [asdict(row) for row in rows if isinstance(row, DecodeRow)],
        "prefill": [asdict(row) for row in rows if isinstance(row, PrefillRow)],
        "soak": None if soaked is None else asdict(soaked) | {"problems": soaked.problems()},
    }


def _rows(
    model: LoadedModel, options: EngineOptions, copy_rate: float | None, upstream: list[dict[str, Any]] | None
) -> Iterator[Row]:
    for tokens in options.prefills:
        theirs = _found(upstream, kind="prefill", tokens=tokens)
        yield _prefill_row(model, options, tokens, theirs)
    for context in options.contexts:
        for batch in options.batches:
            theirs = _found(upstream, kind="decode", batch=batch, context_tokens=context)
            yield _decode_row(model, options, batch, context, copy_rate, theirs)


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


def _upstream(options: EngineOptions, folder: str) -> Iterator[dict[str, Any]]:
    """What transformers' process says line by line, until it ends or its time is over."""
    asked = {
        "config": folder,
        "device": options.device,
        "dtype": options.dtype,
        "batches": options.batches,
        "contexts": options.contexts,
        "prefills": options.prefills,
        "steps": options.steps,
    }
    command = [sys.executable, "-m", "day0.bench.engine_upstream"]
    try:
        done = subprocess.run(
            command,
            check=False,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=options.upstream_seconds,
        )
        said, failed = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        said, failed = (late.stdout or b"").decode(), ""
    if failed:
        raise ValueError(f"compare_upstream: transformers' process failed: {failed.strip().splitlines()[-1]}")
    for line in said.splitlines():
        yield json.loads(line)


def _found(upstream: list[dict[str, Any]] | None, **of: Any) -> dict[str, Any]:
    """The line about this case; where it was asked for and there is none, why."""
    if upstream is None:
        return {}
    match = next((line for line in upstream if of.items() <= line.items()), None)
    return match or {"error": "not reached in its time"}


def _copy_rate(options: EngineOptions) -> float | None:
    if options.device != "cuda":
        return None
    from day0.bench.ops.timing import copy_bytes_per_second

    rate = copy_bytes_per_second()
    torch.cuda.empty_cache()
    return rate


def _load(options: EngineOptions, folder: str, load_format: str) -> LoadedModel:
    most = max(options.batches)
    # A sequence needs blocks for what it will have at the end, and one more may be half empty.
    longest = max(options.contexts) + max(options.steps + WARM_UP_STEPS, SOAK_NEW_TOKENS) + 1
    blocks = max(most * _blocks_of(longest), max((_blocks_of(tokens + 1) for tokens in options.prefills), default=0))
    settings = LlmSettings(
        model=folder,
        load_format=load_format,
        device=options.device,
        dtype=options.dtype,
        tier="native",
        block_size=BLOCK_SIZE,
        cache_tokens=blocks * BLOCK_SIZE,
        prefix_cache=False,
        max_snapshots=0,
        max_running_sequences=most,
        # A whole chunk fits beside the decode steps of all others.
        max_batch_tokens=options.max_batch_tokens + most,
        prefill_chunk_tokens=options.max_batch_tokens,
    )
    source = open_source(settings)
    try:
        return load_model(settings, source)
    finally:
        source.close()


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE) + 1


def _prefill_row(model: LoadedModel, options: EngineOptions, tokens: int, theirs: dict[str, Any]) -> PrefillRow:
    cuda = options.device == "cuda"
    # Kernels of the last, shorter chunk are compiled by a prompt that is thrown away.
    _discard(model, tokens % options.max_batch_tokens or options.max_batch_tokens)
    _discard(model, min(tokens, options.max_batch_tokens))
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    sequences = random_sequences(model, tokens, 1, SEED)
    seconds = prefill(model, sequences)
    remove(model, sequences)
    return PrefillRow(
        tokens=tokens,
        seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
        upstream_seconds=theirs.get("seconds"),
        upstream_peak_bytes=theirs.get("peak_bytes"),
        upstream_error=theirs.get("error"),
    )


def _discard(model: LoadedModel, tokens: int) -> None:
    sequences = random_sequences(model, tokens, 1, SEED + 1)
    prefill(model, sequences)
    remove(model, sequences)


def _decode_row(
    model: LoadedModel,
    options: EngineOptions,
    batch: int,
    context: int,
    copy_rate: float | None,
    theirs: dict[str, Any],
) -> DecodeRow:
    sequences = random_sequences(model, context, batch, SEED + batch)
    prefill(model, sequences)
    steps = [step(model) for _ in range(WARM_UP_STEPS + options.steps)][WARM_UP_STEPS:]
    remove(model, sequences)
    floor_ms = None
    if copy_rate is not None:
        assert isinstance(model.runner, NativeRunner)
        floor_ms = step_bytes(model.runner.model, batch, context).total / copy_rate * 1e3
    return DecodeRow(
        batch=batch,
        context_tokens=context,
        decode_ms=statistics.median(one.whole for one in steps) * 1e3,
        host_ms=statistics.median(one.host for one in steps) * 1e3,
        floor_ms=floor_ms,
        upstream_ms=theirs.get("decode_ms"),
        upstream_error=theirs.get("error"),
    )
