"""Sums of two numbers up to 999; a tenth of all pairs of numbers is kept from training."""

from __future__ import annotations

from random import Random

from training.demo.chat import Turn
from training.demo.splits import split_of
from training.demo.tasks.room import Room

PHRASINGS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Please add {a} and {b}.",
)


def addends(random: Random, split: str) -> tuple[int, int]:
    """Two numbers of one to three digits whose pair, in either order, belongs to the split."""
    while True:
        limits = random.choices((10, 100, 1000), (1, 4, 5), k=2)
        a, b = (random.randrange(1, limit) for limit in limits)
        if split_of("sum", f"{min(a, b)}+{max(a, b)}") == split:
            return a, b


def sum_of_two(room: Room) -> list[Turn]:
    a, b = addends(room.random, room.split)
    return [Turn("sums", (room.one_of(PHRASINGS).format(a=a, b=b),), f"The sum is {a + b}.")]
