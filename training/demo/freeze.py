"""Writes the held-out examples to one compact file and reads them again; knows nothing of the model.

The file is what `day0.heldout` reads: JSON lines, xz-compressed, the tasks first.
Usage: python -m training.demo.freeze FILE [--count N] [--seed N]
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

from training.demo.heldout import SCORES, Content, Example, examples

COUNT = 100
TITLES = {
    "shapes": "colour and shape",
    "counts": "count of shapes",
    "sides": "left and right",
    "numbers": "numbers of 2-4 digits, unseen typefaces",
    "digits": "handwritten digits, unseen hands",
    "words": "short words, unseen typefaces",
    "two_pictures": "two pictures in order",
    "several_pictures": "several pictures in one chat",
    "second_turns": "second turn about the first",
    "far_picture_300": "picture 300 tokens before its question",
    "far_picture_1000": "picture 1,000 tokens before its question",
    "facts": "1,000 invented facts, unseen phrasing",
    "sums": "unseen sums",
    "pairs_128_at_1k": "128 keys in 1k tokens",
    "pairs_256_at_2k": "256 keys in 2k tokens",
    "pairs_340_at_4k": "340 keys in 4k tokens",
    "copies": "copy of a random string",
    "needle_1k": "needle in 1k tokens, five depths",
    "needle_4k": "needle in 4k tokens, five depths",
    "needle_8k": "needle in 8k tokens, five depths",
    "needle_16k": "needle in 16k tokens, five depths",
    "last_write": "last of several writes",
    "mode_word": "mode word far back",
    "running_sum": "running sum over turns",
    "refusals": "says what it cannot do",
}
# Of scores whose examples take many bytes, or whose prompts take minutes on a CPU, there are fewer.
SHARES = {
    "refusals": 0.5,
    "several_pictures": 0.5,
    "far_picture_300": 0.5,
    "pairs_128_at_1k": 0.5,
    "pairs_340_at_4k": 0.5,
    "needle_1k": 0.5,
    "needle_4k": 0.25,
    "needle_8k": 0.5,
    "needle_16k": 0.1,
}


def frozen_examples(count: int, seed: int) -> list[Example]:
    """`count` examples of each score, fewer of some, in the scores' order."""
    return [example for task in SCORES for example in examples(task, max(int(count * SHARES.get(task, 1)), 1), seed)]


def write(path: Path, found: Iterable[Example]) -> int:
    """Write the tasks and the examples and return the file's bytes."""
    tasks = [{"name": name, "title": TITLES[name], "must_reach": score.must_reach} for name, score in SCORES.items()]
    lines = [json.dumps({"tasks": tasks})]
    for example in found:
        messages = [[role, [packed(part) for part in parts]] for role, parts in example.messages]
        lines.append(json.dumps({"task": example.task, "messages": messages, "answer": example.answer}))
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    return path.stat().st_size


def read(path: Path) -> list[Example]:
    """The examples of a file that `write` made."""
    found = []
    for line in lzma.decompress(path.read_bytes()).decode().splitlines()[1:]:
        entry = json.loads(line)
        messages = tuple((role, tuple(unpacked(part) for part in parts)) for role, parts in entry["messages"])
        found.append(Example(entry["task"], messages, entry["answer"]))
    return found


def packed(part: Content) -> dict[str, str]:
    return {"text": part} if isinstance(part, str) else {"png": base64.b64encode(part).decode()}


def unpacked(part: dict[str, str]) -> Content:
    return part["text"] if "text" in part else base64.b64decode(part["png"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = frozen_examples(options.count, options.seed)
    print(f"{len(chosen)} examples, {write(options.file, chosen) / 2**20:.2f} MiB")
