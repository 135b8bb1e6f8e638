"""Scores a checkpoint on held-out examples with upstream's unmodified forward and its own choice; it knows no training.

An example is right when every token of its answer, the end token included, is the most likely one after the tokens
before it. That is what greedy generation gives, at the price of one forward.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.demo.tower import patches_of

EXAMPLES_PER_TASK = 100
ROUND = 25
# Long prompts are few: one of them is as much work as a hundred short ones.
FEWER = {"needle_16k": 10, "needle_8k": 25, "needle_4k": 25, "pairs_340_at_4k": 50}
TOKENS_PER_BATCH = 65_536
# The indexer's scores are `[B, L, 32, L / 4]`: tokens times length is what must fit.
SCORES_PER_BATCH = 1 << 28


@dataclass(frozen=True, slots=True)
class Rendered:
    """An example as token ids: prompt, answer with its end token, and its pictures uint8 `[n, 112, 112, 3]`."""

    task: str
    ids: list[int]
    answer: list[int]
    images: np.ndarray


def rendered_examples(seed: int, deadline: float, count: int = EXAMPLES_PER_TASK) -> list[Rendered]:
    """Examples of every held-out task, `count` of each or as many as can be drawn until the monotonic `deadline`."""
    from training.demo.heldout import SCORES, examples, render
    from training.demo.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    found: list[Rendered] = []
    for part in range(-(-count // ROUND)):
        for task in SCORES:
            if part * ROUND >= FEWER.get(task, count):
                continue
            if time.monotonic() > deadline:
                return found
            for example in examples(task, min(ROUND, FEWER.get(task, count)), seed + part):
                ids, answer, images = render(example, tokenizer)
                found.append(Rendered(task, list(ids), list(answer), as_pixels(images)))
    return found


def as_pixels(images: Any) -> np.ndarray:
    """Pictures of 112 x 112 as one array uint8 `[n, 112, 112, 3]`."""
    if not len(images):
        return np.zeros((0, 112, 112, 3), dtype=np.uint8)
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])


def save_examples(path: Path, seed: int, deadline: float) -> None:
    """Writes rendered examples as a pickle, complete or not at all."""
    found = rendered_examples(seed, deadline)
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(found))
    partial.rename(path)


def batches(found: Sequence[Rendered]) -> Iterator[list[Rendered]]:
    """Groups of similar length that fit in memory; early examples of every task first."""
    rounds: dict[int, list[Rendered]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for example in found:
        rounds[seen[example.task] // ROUND].append(example)
        seen[example.task] += 1
    for number in sorted(rounds):
        group: list[Rendered] = []
        for example in sorted(rounds[number], key=lambda e: len(e.ids) + len(e.answer)):
            length = len(example.ids) + len(example.answer)
            tokens = (len(group) + 1) * length
            if group and (tokens > TOKENS_PER_BATCH or tokens * length > SCORES_PER_BATCH):
                yield group
                group = []
            group.append(example)
        if group:
            yield group


def pixel_values(images: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """What upstream's processor gives for pictures of 112 x 112: float32 `[n * 64, 1176]` and the grids."""
    patches = patches_of(torch.from_numpy(images).to(device), 14, 2, torch.float32)
    count, places = patches.shape[:2]
    twice = patches.view(count * places, 3, 1, 14 * 14).expand(-1, -1, 2, -1)
    return twice.reshape(count * places, -1), torch.tensor([[1, 8, 8]] * count, device=device)


def run_model(model: Any, group: Sequence[Rendered], device: torch.device) -> list[Tensor]:
    """Logits `[answer tokens, V]` of each example, teacher-forced; rows are padded at the right, which nothing sees."""
    length = max(len(e.ids) + len(e.answer) for e in group)
    ids = torch.full((len(group), length), model.config.text_config.pad_token_id, dtype=torch.int64)
    for row, e in enumerate(group):
        ids[row, : len(e.ids) + len(e.answer)] = torch.tensor(e.ids + e.answer)
    inputs: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": False}
    images = np.concatenate([e.images for e in group])
    if len(images):
        inputs["pixel_values"], inputs["image_grid_thw"] = pixel_values(images, device)
    logits = model(**inputs).logits
    return [logits[row, len(e.ids) - 1 : len(e.ids) + len(e.answer) - 1] for row, e in enumerate(group)]


@torch.no_grad()
def evaluate_model(model: Any, found: Sequence[Rendered], deadline: float) -> dict[str, dict[str, float]]:
    """Per task: `right` and `count` of examples judged before the monotonic `deadline`, and right `tokens` of all."""
    device = next(model.parameters()).device
    results: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for group in batches(found):
        if time.monotonic() > deadline:
            break
        for example, logits in zip(group, run_model(model, group, device), strict=True):
            hits = logits.argmax(-1).cpu() == torch.tensor(example.answer)
            results[example.task].append((bool(hits.all()), float(hits.float().mean())))
    return {
        task: {
            "right": sum(right for right, _ in judged),
            "count": len(judged),
            "exact": sum(right for right, _ in judged) / len(judged),
            "tokens": sum(share for _, share in judged) / len(judged),
        }
        for task, judged in sorted(results.items())
    }


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Upstream's model from a checkpoint folder; MXFP4 experts are decoded, see `golden.load_decoded`."""
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        from training.demo.golden import load_decoded

        return load_decoded(folder, dtype).to(device).eval()
    from transformers import Glm5NextForConditionalGeneration

    return (
        Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
        .to(device)
        .eval()
    )


def evaluate_folder(folder: Path, examples: Path, deadline: float) -> dict[str, dict[str, float]]:
    """Scores by task of the checkpoint in `folder` on examples saved before; bfloat16 on a GPU, else float32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(folder, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    return evaluate_model(model, pickle.loads(examples.read_bytes()), deadline)


def table(scores: dict[str, dict[str, float]]) -> str:
    """A line a task."""
    from training.demo.heldout import SCORES

    lines = [f"{'task':<28} {'exact':>6} {'tokens':>7} {'right':>6} {'of':>5}  must reach"]
    for task, s in scores.items():
        goal = SCORES[task].must_reach if task in SCORES else None
        judged = "" if goal is None else f"{goal:.2f} {'reached' if s['exact'] >= goal else 'MISSED'}"
        lines.append(
            f"{task:<28} {s['exact']:6.3f} {s['tokens']:7.4f} {s['right']:6.0f} {s['count']:5.0f}  {judged}".rstrip()
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=EXAMPLES_PER_TASK, help="examples of each task")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=600.0, help="for judging")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.checkpoint, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    found = rendered_examples(options.seed, time.monotonic() + options.seconds, options.count)
    scores = evaluate_model(model, found, time.monotonic() + options.seconds)
    print(json.dumps(scores) if options.json else table(scores))


if __name__ == "__main__":
    main()
