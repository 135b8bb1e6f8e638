"""Switches parts of a checkpoint off, one at a time, and scores the rest with upstream's forward; it knows no training.

`python -m training.demo.ablate CHECKPOINT` prints a table of tasks by ablations. Classes stay upstream's; a switch sets
weights or replaces one call for its time.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as upstream

from training.demo.evaluate import Rendered, batches, evaluate_model, load

TAIL_TOKENS = 64
RESET_TOKENS = 64
RECALL = ("pairs_128_at_1k", "needle_1k")
STATE = ("last_write", "mode_word", "running_sum")
SHORT = ("facts", "sums", "shapes", "numbers", "two_pictures")
TASKS = SHORT + RECALL + STATE
# A prompt of a thousand tokens is as much work as thirty short ones.
SHARES = dict.fromkeys(RECALL, 0.25) | dict.fromkeys(STATE, 0.4)


def layers_of(model: Any, kind: str) -> list[Any]:
    """The attention modules of one kind, as the configuration names them."""
    return [layer.self_attn for layer in model.model.language_model.layers if layer.block_type == kind]


@contextmanager
def changed(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces the tensors' values and puts them back."""
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(change(old))
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)


@contextmanager
def random_indexer(model: Any) -> Iterator[None]:
    """Indexers with random weights of the same deviation: they choose, but not what is needed."""
    tensors = [
        weight
        for attention in layers_of(model, "indexed_attention")
        for weight in (
            attention.indexer.wq_b.weight,
            attention.indexer.wk.weight,
            attention.indexer.weights_proj.weight,
        )
    ]
    generator = torch.Generator().manual_seed(0)
    with changed(tensors, lambda old: (torch.randn(old.shape, generator=generator) * old.float().cpu().std()).to(old)):
        yield


@contextmanager
def tail_attention(model: Any) -> Iterator[None]:
    """Every query attends to the last 64 tokens only."""
    indexers = [attention.indexer for attention in layers_of(model, "indexed_attention")]

    def last(hidden_states: Tensor, **_: Any) -> Tensor:
        batch, length = hidden_states.shape[:2]
        positions = torch.arange(length, device=hidden_states.device)
        chosen = positions[:, None] - torch.arange(TAIL_TOKENS, device=hidden_states.device)
        return chosen.clamp_min(-1).to(torch.int32).expand(batch, -1, -1)

    for indexer in indexers:
        indexer.forward = last
    try:
        yield
    finally:
        for indexer in indexers:
            del indexer.forward


@contextmanager
def no_delta(model: Any) -> Iterator[None]:
    """Delta attention writes nothing to the residual."""
    with changed([attention.o_proj.weight for attention in layers_of(model, "linear_attention")], torch.zeros_like):
        yield


@contextmanager
def cut_state(cuts: Callable[[int, int], Sequence[int]]) -> Iterator[None]:
    """The delta state is set to zero before each position of `cuts(row, length)`; convolutions go on."""
    whole = upstream.chunk_kimi_delta_attention

    def in_parts(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **others: Any) -> Any:
        length = query.shape[1]
        rows = []
        for row in range(query.shape[0]):
            edges = [0, *cuts(row, length), length]
            parts = [
                whole(*(t[row : row + 1, a:b] for t in (query, key, value, g, beta)), **others)[0]
                for a, b in pairwise(edges)
            ]
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows), None

    upstream.chunk_kimi_delta_attention = in_parts
    try:
        yield
    finally:
        upstream.chunk_kimi_delta_attention = whole


def state_reset(model: Any) -> Any:
    """The delta state is set to zero once, in the middle of each prompt."""
    return cut_state(lambda row, length: [model.ablation_middles[row]])


def short_state(model: Any) -> Any:
    """The delta state is set to zero at every 64th token: nothing is carried further."""
    return cut_state(lambda row, length: range(RESET_TOKENS, length, RESET_TOKENS))


@contextmanager
def experts_zeroed(model: Any) -> Iterator[None]:
    """Routed experts add nothing."""
    with changed([layer.mlp.experts.down_proj for layer in model.model.language_model.layers], torch.zeros_like):
        yield


@contextmanager
def experts_permuted(model: Any) -> Iterator[None]:
    """Each expert does its neighbour's work."""
    experts = [layer.mlp.experts for layer in model.model.language_model.layers]
    tensors = [tensor for expert in experts for tensor in (expert.gate_up_proj, expert.down_proj)]
    with changed(tensors, lambda old: old.roll(1, 0)):
        yield


@contextmanager
def as_shipped(model: Any) -> Iterator[None]:
    """Nothing is changed."""
    yield


@dataclass(frozen=True, slots=True)
class Ablation:
    """How a part is switched off, and the tasks that may need it; others would only cost time."""

    switch: Callable[[Any], Any]
    tasks: Sequence[str]


ABLATIONS: dict[str, Ablation] = {
    "shipped": Ablation(as_shipped, TASKS),
    "images swapped": Ablation(as_shipped, SHORT),
    "experts zero": Ablation(experts_zeroed, SHORT),
    "experts moved": Ablation(experts_permuted, SHORT),
    "no delta": Ablation(no_delta, SHORT),
    "indexer random": Ablation(random_indexer, RECALL),
    "last 64 tokens": Ablation(tail_attention, RECALL),
    "state reset": Ablation(state_reset, STATE),
    "state of 64": Ablation(short_state, STATE),
}


def swap_images(examples: Sequence[Rendered]) -> list[Rendered]:
    """Every example with the pictures of the next one of its task that has as many."""
    groups: dict[tuple[str, int], list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault((example.task, len(example.images)), []).append(index)
    swapped = list(examples)
    for indices in groups.values():
        for index, other in zip(indices, np.roll(indices, -1), strict=True):
            old = examples[index]
            swapped[index] = Rendered(old.task, old.ids, old.answer, examples[other].images)
    return swapped


def score(model: Any, name: str, examples: Sequence[Rendered]) -> dict[str, float]:
    """Share of right answers under one ablation, by those of its tasks that have examples."""
    found = {}
    for task in ABLATIONS[name].tasks:
        shown = [example for example in examples if example.task == task]
        if not shown:
            continue
        if name == "images swapped":
            shown = swap_images(shown)
        right = 0.0
        with ABLATIONS[name].switch(model):
            for group in batches(shown):
                model.ablation_middles = [max(1, len(example.ids) // 2) for example in group]
                right += evaluate_model(model, group, float("inf"))[task]["right"]
        found[task] = right / len(shown)
    return found


def table(scores: dict[str, dict[str, float]], tasks: Sequence[str]) -> str:
    """Tasks in rows, ablations in columns."""
    lines = [f"{'':<18}" + "".join(f"{name:>16}" for name in scores)]
    for task in tasks:
        cells = (scores[name].get(task) for name in scores)
        lines.append(f"{task:<18}" + "".join(f"{'-':>16}" if cell is None else f"{cell:16.2f}" for cell in cells))
    return "\n".join(lines)


def draw(tasks: Sequence[str], count: int, seed: int) -> list[Rendered]:
    """`count` held-out examples of each task, fewer of the long ones."""
    from training.demo.evaluate import as_pixels
    from training.demo.heldout import examples, render
    from training.demo.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    found = []
    for task in tasks:
        for example in examples(task, round(count * SHARES.get(task, 1.0)), seed):
            ids, answer, images = render(example, tokenizer)
            found.append(Rendered(task, list(ids), list(answer), as_pixels(images)))
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--ablations", nargs="+", default=list(ABLATIONS), choices=list(ABLATIONS))
    parser.add_argument("--count", type=int, default=50, help="examples of each task")
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--json", type=Path, help="file for the scores")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.checkpoint, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    examples = draw(options.tasks, options.count, options.seed)
    scores: dict[str, dict[str, float]] = {}
    for name in options.ablations:
        scores[name] = score(model, name, examples)
        print(f"{name}: {json.dumps(scores[name])}", flush=True)
        if options.json:
            found = {"counts": Counter(e.task for e in examples), "seed": options.seed, "scores": scores}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(scores, options.tasks))


if __name__ == "__main__":
    main()
