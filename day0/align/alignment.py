"""Runs both sides over the same cases and gathers what the taps say; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from day0.align import glm5_next
from day0.align.case import Case, embeddings, make_cases, picture
from day0.align.family import AlignFamily
from day0.align.probe import Place, Probe
from day0.align.recorder import Recorder
from day0.align.reference import AlignError, Environment, environment, load_upstream
from day0.align.tap import Comparison
from day0.align.vision import align_vision
from llm_svc.adopt.families import FAMILIES
from llm_svc.build import LoadError
from llm_svc.core import Batch
from llm_svc.embeddings import batch_embeddings
from llm_svc.loading import LoadedModel, load_model
from llm_svc.native_runner import NativeRunner
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings

TAPS: dict[str, AlignFamily] = {"glm5_next": glm5_next.FAMILY}
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Passage:
    """One way through one case: `forced` judges each operator on upstream's inputs, else errors add up."""

    case: str
    forced: bool
    tokens: int
    forwards: int
    comparisons: tuple[Comparison, ...]

    @property
    def first_divergence(self) -> Comparison | None:
        """In the order of the computation."""
        return next((found for found in self.comparisons if not found.verdict.passes), None)


@dataclass(frozen=True, slots=True)
class Alignment:
    """What `align` found."""

    model: str
    dtype: str
    environment: Environment
    passages: tuple[Passage, ...]

    @property
    def culprit(self) -> Comparison | None:
        """The first operator that differs on upstream's inputs; else where the whole way first does."""
        order = sorted(self.passages, key=lambda passage: not passage.forced)
        return next((p.first_divergence for p in order if p.first_divergence is not None), None)


class Loaded:
    """Both sides of one checkpoint. Tests break `native` on purpose."""

    def __init__(self, folder: Path, dtype: str) -> None:
        settings = LlmSettings(
            model=str(folder),
            tier="native",
            dtype=dtype,
            block_size=BLOCK_TOKENS,
            vision_target="unused:1",
            prefix_cache=False,
            # Both ways of the packed product give the same bits; the fused one reads what the checkpoint holds.
            experts_convert_tokens=0,
        )
        with closing(open_source(settings)) as source:
            self.native: LoadedModel = load_model(settings, source)
        assert isinstance(self.native.runner, NativeRunner)
        self.model_type = next(
            name for name, f in FAMILIES.items() if f.model.__name__ == self.native.facts.architecture
        )
        self.taps = TAPS[self.model_type]
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.folder = folder
        self.upstream = load_upstream(folder, FAMILIES[self.model_type], self.dtype)


def align(
    folder: Path, dtype: str, *, accelerators_allowed: bool = False, told: Callable[[str], None] = lambda what: None
) -> Alignment:
    """Compares a checkpoint of an adopted family with upstream. Raises AlignError and CheckpointError."""
    around = environment()
    if around.accelerators and not accelerators_allowed:
        raise AlignError(
            f"{' and '.join(around.accelerators)} installed: upstream would run their kernels instead of its own "
            "formulas; uninstall, or allow it with --with-kernels and read the verdict as one against them"
        )
    told("loading both sides")
    try:
        loaded = Loaded(folder, dtype)
    except LoadError as error:
        raise AlignError(f"MODEL: {error}") from error
    return align_loaded(loaded, dtype, around, told)


@torch.inference_mode()
def align_loaded(
    loaded: Loaded,
    dtype: str,
    around: Environment,
    told: Callable[[str], None] = lambda what: None,
    *,
    end_to_end: bool = True,
) -> Alignment:
    """The same for two sides that are there; without `end_to_end` operator by operator alone."""
    passages = []
    told("vision")
    comparisons, ours, theirs = align_vision(loaded.folder, loaded.upstream, picture(), dtype)
    passages.append(Passage("picture through the tower", True, len(ours), 1, tuple(comparisons)))
    for case in make_cases(loaded.upstream.config, ours, BLOCK_TOKENS):
        for forced in (True, False) if end_to_end else (True,):
            told(f"{case.name}, {'operator by operator' if forced else 'end to end'}")
            passages.append(_pass(loaded, case, [theirs] * len(case.images), forced))
    return Alignment(loaded.folder.name, dtype, around, tuple(passages))


def _pass(loaded: Loaded, case: Case, visual: list[torch.Tensor], forced: bool) -> Passage:
    upstream, native = loaded.upstream, loaded.native
    text = upstream.config.get_text_config()
    parts: tuple[Any, Any] = FAMILIES[loaded.model_type].parts(upstream)
    definition, head = parts
    rows = embeddings(definition.embed_tokens, case, visual)
    runner = native.runner
    assert isinstance(runner, NativeRunner)
    probe = Probe(runner.model, text, loaded.taps, loaded.dtype, forced)
    probing = NativeRunner(probe.model, native.facts)
    recorder, cache = Recorder(len(definition.layers)), DynamicCache(config=text)
    forwards = 0
    with recorder.watching(definition.layers, loaded.taps):
        for batch in _batches(native, case):
            (item,) = batch.items
            recorder.forget()
            piece = rows[:, item.start : item.start + item.count]
            hidden = definition(inputs_embeds=piece, cache=cache, use_cache=True).last_hidden_state
            for number, layer in enumerate(definition.layers):
                recorder.layers[number] |= loaded.taps.extras(layer, cache, number)
            place = _place(batch)
            with probe.step(recorder.layers, place):
                ours = batch_embeddings(probe.model.language_model.embed_tokens, batch, probe.model.device)
                probe.see_whole("embeddings", "embeddings", ours, piece, int(text.hidden_size))
                logits = probing.run(batch)
            if item.samples:
                width = int(text.hidden_size)
                probe.see_whole("logits", "final norm and head", logits, head(hidden[:, -1]).float(), width)
            forwards += 1
    return Passage(case.name, forced, len(case.ids), forwards, tuple(probe.comparisons))


def _batches(native: LoadedModel, case: Case) -> Iterator[Batch]:
    """The real scheduler cuts the prompt; the tokens that follow are given."""
    scheduler = native.scheduler
    scheduler.limits = replace(scheduler.limits, prefill_chunk_tokens=case.chunk_tokens)
    sequence = case.sequence()
    scheduler.add(sequence)
    try:
        while len(sequence.output_ids) <= case.decodes:
            batch = scheduler.schedule()
            yield batch
            scheduler.finish(batch)
            if batch.sampled:
                follows = len(sequence)
                sequence.output_ids.append(case.ids[follows] if follows < len(case.ids) else 0)
    finally:
        scheduler.remove(sequence)


def _place(batch: Batch) -> Place:
    (item,) = batch.items
    assert item.sequence.state_slot is not None
    end = item.start + item.count
    slots = [item.sequence.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(end)]
    return Place(torch.tensor(slots), item.sequence.state_slot, item.start)
