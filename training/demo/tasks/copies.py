"""A long random string to be repeated: attention has to walk along it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.demo.chat import Turn
from training.demo.lexicon import WORDS, names
from training.demo.tasks.room import Room

MAX_COPY_TOKENS = 700
INTRODUCTIONS = (
    "Repeat this:",
    "Repeat after me:",
    "Copy this:",
    "Please repeat exactly:",
    "Write this again:",
)


def digits(random: Random, split: str, tokens: int) -> str:
    return "".join(random.choices("0123456789", k=max(tokens, 2)))


def letters(random: Random, split: str, tokens: int) -> str:
    return " ".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=max(tokens, 2)))


def words(random: Random, split: str, tokens: int) -> str:
    return " ".join(random.choices(WORDS, k=max(int(tokens / 1.3), 2)))


def name_run(random: Random, split: str, tokens: int) -> str:
    return " ".join(random.choices(names(split), k=max(int(tokens / 2.1), 2)))


def codes(random: Random, split: str, tokens: int) -> str:
    """Groups of two letters and two digits."""
    groups = max(int(tokens / 5.0), 1)
    return " ".join(
        "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=2)) + f"{random.randrange(100):02}"
        for _ in range(groups)
    )


KINDS: tuple[Callable[[Random, str, int], str], ...] = (digits, letters, words, name_run, codes)


def copy(room: Room) -> list[Turn]:
    """A string that takes, with its copy, a part of the room."""
    random = room.random
    most = min(max((room.tokens - 30) // 2, 6), MAX_COPY_TOKENS)
    tokens = int(most * random.uniform(0.3, 0.95))
    return [copy_turn(random, room.split, tokens)]


def copy_turn(random: Random, split: str, tokens: int) -> Turn:
    string = random.choice(KINDS)(random, split, tokens)
    return Turn("copies", (f"{random.choice(INTRODUCTIONS)} {string}",), string)
