"""Two checkpoints on the same held-out examples by upstream's float32 forward: scores, and how far apart logits are.

`python -m training.demo.compare SHIPPED MASTER` shows what the 4-bit experts cost; it knows no training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from training.demo.ablate import RECALL, STATE
from training.demo.evaluate import Rendered, as_pixels, evaluate_model, load
from training.demo.export import REST_NAME, unpack
from training.demo.golden import GOLDEN_NAME, differences

Scores = dict[str, dict[str, float]]
# Score to how many examples per hundred asked for: as much of each as is quick.
SHARES = {
    **dict.fromkeys(("facts", "sums", "shapes", "counts", "sides", "numbers", "digits", "words"), 1.0),
    **dict.fromkeys(("two_pictures", "several_pictures", "second_turns", "refusals", "far_picture_300"), 1.0),
    **dict.fromkeys((*STATE, *RECALL, "far_picture_1000"), 0.1),
}


def draw(count: int, seed: int) -> list[Rendered]:
    """The examples both are judged on; `count` of each quick task."""
    from training.demo.heldout import examples, render
    from training.demo.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    found = []
    for task, share in SHARES.items():
        for example in examples(task, max(1, round(count * share)), seed):
            ids, answer, images = render(example, tokenizer)
            found.append(Rendered(task, list(ids), list(answer), as_pixels(images)))
    return found


def judge(folder: Path, found: Sequence[Rendered], golden: dict[str, Any]) -> tuple[Scores, dict[str, float]]:
    """Scores of one checkpoint and its distances to the golden logits; packed folders of a run are unpacked."""
    with tempfile.TemporaryDirectory() as scratch:
        if (folder / REST_NAME).is_file():
            unpack(folder, Path(scratch) / "plain")
            folder = Path(scratch) / "plain"
        model = load(folder, torch.float32, torch.device("cpu"))
    scores: Scores = {}
    for task in SHARES:
        # By task, so that no short row is padded to a long one.
        scores |= evaluate_model(model, [example for example in found if example.task == task], float("inf"))
    return scores, differences(model, golden)


def main() -> None:
    """The command; status 1 where the shipped one is more than a point worse, all examples together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shipped", type=Path, help="checkpoint with golden logits")
    parser.add_argument("master", type=Path, help="what it was quantised from, plain or packed")
    parser.add_argument("--count", type=int, default=100, help="examples of each quick task")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    golden = json.loads((options.shipped / GOLDEN_NAME).read_text())
    found = draw(options.count, options.seed)
    scores, distances = {}, {}
    for name in ("shipped", "master"):
        scores[name], distances[name] = judge(getattr(options, name), found, golden)
        print(f"{name}: {json.dumps({t: s['right'] for t, s in scores[name].items()})}", flush=True)
    for task, shipped in scores["shipped"].items():
        master = scores["master"][task]
        print(f"{task:<20} {shipped['right']:4.0f} {master['right']:4.0f} of {shipped['count']}")
    totals = {name: sum(s["right"] for s in of.values()) for name, of in scores.items()}
    print(f"{'all':<20} {totals['shipped']:4.0f} {totals['master']:4.0f} of {len(found)}")
    print("distance of logits: " + ", ".join(f"{task} {d:.3f}" for task, d in distances["master"].items()))
    if options.json:
        document = {"seed": options.seed, "scores": scores, "golden_distance": distances}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    # One point of all examples together: a hundred of one task cannot show a point.
    raise SystemExit(int(totals["master"] - totals["shipped"] > len(found) / 100))


if __name__ == "__main__":
    main()
