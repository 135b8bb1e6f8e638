"""What a picture shows, as words; knows nothing of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.demo.lexicon import COLOURS, PICTURE_WORDS, SHAPES, article
from training.demo.splits import split_of

MAX_COUNT = 9


@dataclass(frozen=True)
class Picture:
    """One picture: its kind, what it shows, and the seed of everything that is left to chance.

    `content` is (colour, shape) for "shape", (digits,) for "number", (digit,) for "digit", (word,) for "word", (count,)
    for "count", (left colour, left shape, right colour, right shape) for "sides" and () for "photo".
    """

    kind: str
    content: tuple[str, ...]
    split: str
    seed: int

    @property
    def phrase(self) -> str:
        """The content as a noun phrase that fits into a sentence."""
        match self.kind:
            case "shape":
                return article(" ".join(self.content))
            case "number" | "digit" | "word":
                return f"the {self.kind} {self.content[0]}"
        raise ValueError(f"a picture of kind {self.kind} has no phrase")

    @property
    def sentence(self) -> str:
        """The answer to "What do you see?"."""
        if self.kind == "shape":
            return f"It is {self.phrase}."
        return f"The {self.kind} is {self.content[0]}."


def pick_number(random: Random, split: str) -> str:
    """Two to four digits without a leading zero; a tenth of the three- and four-digit ones is kept from training."""
    length = random.choice((2, 3, 4))
    while True:
        number = str(random.randrange(10 ** (length - 1), 10**length))
        if length == 2 or split_of("number", number) == split:
            return number


def shape_picture(random: Random, split: str) -> Picture:
    content = (random.choice(tuple(COLOURS)), random.choice(SHAPES))
    return Picture("shape", content, split, random.getrandbits(48))


def number_picture(random: Random, split: str) -> Picture:
    return Picture("number", (pick_number(random, split),), split, random.getrandbits(48))


def digit_picture(random: Random, split: str) -> Picture:
    return Picture("digit", (str(random.randrange(10)),), split, random.getrandbits(48))


def word_picture(random: Random, split: str) -> Picture:
    return Picture("word", (random.choice(PICTURE_WORDS),), split, random.getrandbits(48))


def count_picture(random: Random, split: str) -> Picture:
    return Picture("count", (str(random.randint(1, MAX_COUNT)),), split, random.getrandbits(48))


def sides_picture(random: Random, split: str) -> Picture:
    """Two shapes that differ in colour."""
    first, second = random.sample(tuple(COLOURS), 2)
    content = (first, random.choice(SHAPES), second, random.choice(SHAPES))
    return Picture("sides", content, split, random.getrandbits(48))


def photo_picture(random: Random, split: str) -> Picture:
    return Picture("photo", (), split, random.getrandbits(48))


def any_picture(random: Random, split: str) -> Picture:
    """A picture that can be named in a phrase: mostly shapes and numbers."""
    kind = random.choices((shape_picture, number_picture, digit_picture, word_picture), (5, 3, 1, 2))[0]
    return kind(random, split)
