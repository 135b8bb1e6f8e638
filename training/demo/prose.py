"""Real English text, as excerpts of a wanted length; knows nothing of tokens or tasks."""

from __future__ import annotations

import lzma
from bisect import bisect_right
from functools import cache
from pathlib import Path
from random import Random

from training.demo.splits import check_split

FOLDER = Path(__file__).parent / "text"

TITLES = ("Mr.", "Mrs.", "Dr.", "St.")

# Measured with the demo tokenizer on the training text; held by a test.
CHARACTERS_PER_TOKEN = 3.25


@cache
def prose(split: str) -> str:
    """All text of a split: paragraphs, each one line."""
    check_split(split)
    return lzma.decompress((FOLDER / f"{split}.txt.xz").read_bytes()).decode()


@cache
def sentence_starts(split: str) -> list[int]:
    """Character offsets at which a sentence begins."""
    text = prose(split)
    starts = [0]
    for index in range(len(text) - 3):
        if text[index] == "\n" or (
            text[index] == " "
            and text[index - 1] in ".!?"
            and text[index + 1].isupper()
            and not text.endswith(TITLES, max(index - 4, 0), index)
        ):
            starts.append(index + 1)
    return starts


def sentences(random: Random, split: str, characters: int) -> list[str]:
    """Consecutive sentences of about `characters` characters, at least one, from a random place of the split."""
    text = prose(split)
    starts = sentence_starts(split)
    last = bisect_right(starts, len(text) - characters) - 1
    index = random.randrange(max(last, 0) + 1)
    begin = starts[index]
    found = []
    while index + 1 < len(starts) and starts[index + 1] - begin <= max(characters, 1):
        found.append(text[starts[index] : starts[index + 1]].strip())
        index += 1
    return found or [text[begin : begin + max(characters, 20)].rsplit(" ", 1)[0]]


def excerpt(random: Random, split: str, tokens: int) -> str:
    """Whole sentences of about `tokens` tokens as one text."""
    return " ".join(sentences(random, split, int(tokens * CHARACTERS_PER_TOKEN)))
