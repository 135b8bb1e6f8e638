"""Measures an indexer's choice against dense attention over the same latents; plots and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from day0.align.reference import AlignError
from llm_svc.adopt.operators import Operators
from llm_svc.build import LoadError
from llm_svc.cache.storage import IndexedLayerCache
from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams
from llm_svc.core import Sequence as RunningSequence
from llm_svc.loading import load_model
from llm_svc.native_runner import NativeRunner
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings

_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Recall:
    """One layer at one length, means over its queries.

    `recall` is the share of the positions with the most dense attention that the indexer chose, `mass` the dense
    attention on what it chose, `best_mass` that on the same number of best positions. `chance` is what a random choice
    would have as recall and, on average, as mass.
    """

    layer: int
    length_tokens: int
    queries: int
    chosen: float
    recall: float
    mass: float
    best_mass: float
    chance: float


@dataclass(frozen=True, slots=True)
class Recalls:
    """All layers and lengths; `text` says what was read."""

    model: str
    text: str
    dtype: str
    recalls: tuple[Recall, ...]


def measure_recall(
    folder: Path,
    text: str,
    described: str,
    lengths: Sequence[int],
    *,
    queries: int,
    dtype: str,
    device: str,
    told: Callable[[int], None] = lambda tokens: None,
) -> Recalls:
    """Prefills the text once, up to the longest of `lengths` (tokens), and looks at the last queries before each.

    `told` gets the number of tokens done. AlignError where the model has no indexer, or text or context are too short.
    """
    longest = max(lengths)
    block = 16
    settings = LlmSettings(
        model=str(folder),
        tier="native",
        dtype=dtype,
        device=device,
        block_size=block,
        cache_tokens=-(-(longest + 1) // block) * block,
        max_running_sequences=1,
        max_batch_tokens=_CHUNK_TOKENS + 1,
        prefill_chunk_tokens=_CHUNK_TOKENS,
        prefix_cache=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"][:longest])
    if len(ids) < longest:
        raise AlignError(f"--length: {longest} tokens, and {described} has {len(ids)}")
    with closing(open_source(settings)) as source:
        try:
            model = load_model(settings, source)
        except LoadError as error:
            raise AlignError(f"MODEL: {error}") from error
    if longest >= model.facts.context_tokens:
        raise AlignError(f"--length: {longest} must be below the context, {model.facts.context_tokens} tokens")
    assert isinstance(model.runner, NativeRunner)
    watch = _Watch(model.runner, lengths, queries)
    runner = NativeRunner(watch.model, model.facts)
    request = Request("recall", (PromptTokens(ids),), (), SamplingParams(max_tokens=1))
    sequence = RunningSequence(request, Prompt(ids))
    model.scheduler.add(sequence)
    while sequence.computed < len(ids):
        batch = model.scheduler.schedule()
        watch.begin(batch.items[0].start, sequence.blocks, block)
        runner.run(batch)
        model.scheduler.finish(batch)
        told(sequence.computed)
    return Recalls(folder.name, described, dtype, tuple(watch.results()))


class _Watch:
    """Sees each layer's queries, latents and choice as its sparse attention is called."""

    def __init__(self, runner: NativeRunner, lengths: Sequence[int], queries: int) -> None:
        model = runner.model
        self._indexed = [n for n, cache in enumerate(model.layers) if isinstance(cache, IndexedLayerCache)]
        if not self._indexed:
            raise AlignError("MODEL: no layer has an indexer")
        self._wanted = {p: length for length in lengths for p in range(max(length - queries, 0), length)}
        self._found: dict[tuple[int, int], list[tuple[float, ...]]] = {}
        self._calls = 0
        operators: Operators = replace(
            model.operators,
            sparse_mla_prefill=self._wrap(model.operators.sparse_mla_prefill),
            sparse_mla_decode=self._wrap(model.operators.sparse_mla_decode),
        )
        self.model = replace(model, operators=operators)

    def begin(self, start: int, blocks: list[int], block_size: int) -> None:
        """Before a forward of the tokens from `start` on."""
        self._start, self._calls = start, 0
        rows = torch.tensor(blocks)[:, None] * block_size + torch.arange(block_size)
        self._slots = rows.flatten()

    def results(self) -> list[Recall]:
        """By layer, then length."""
        found = []
        for (layer, length), rows in sorted(self._found.items()):
            chosen, recall, mass, best, chance = torch.tensor(rows).double().mean(0).tolist()
            found.append(Recall(layer, length, len(rows), chosen, recall, mass, best, chance))
        return found

    def _wrap(self, operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, latents: Tensor, chosen: Tensor, *args: Any, **options: Any) -> Tensor:
            layer = self._indexed[self._calls]
            self._calls += 1
            for row in range(len(q)):
                position = self._start + row
                if position in self._wanted:
                    keys = latents[self._slots[: position + 1].to(latents.device)]
                    figures = _figures(q[row], keys, chosen[row], options["softmax_scale"])
                    self._found.setdefault((layer, self._wanted[position]), []).append(figures)
            return operator(q, latents, chosen, *args, **options)

        return call


def _figures(q: Tensor, keys: Tensor, chosen: Tensor, softmax_scale: float) -> tuple[float, ...]:
    """q [H, R], keys [S, R], chosen int [W] with -1 for none -> count, recall, mass, best mass, chance.

    Attention over the latents is attention over the keys: the query was taken through the same projection.
    """
    probabilities = torch.softmax(q.float() @ keys.float().T * softmax_scale, -1).mean(0)
    taken = chosen[chosen >= 0].long().unique()
    count = len(taken)
    best = probabilities.topk(count).indices
    recall = torch.isin(best, taken).float().mean().item()
    mass, best_mass = probabilities[taken].sum().item(), probabilities[best].sum().item()
    return float(count), recall, mass, best_mass, count / len(keys)
