"""All tasks: their names, what makes their turns, and how much of the training each gets at each length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from training.demo.chat import Turn
from training.demo.tasks import (
    copies,
    facts,
    needles,
    pairs,
    refusals,
    second_turns,
    several_pictures,
    single_pictures,
    state,
    sums,
)
from training.demo.tasks.room import Room


@dataclass(frozen=True)
class Family:
    """How a task makes turns, and what they cost.

    `tokens` is a typical cost for tasks that ask one thing; those that fill a row take what they get and are used once
    a row. `pictures` is the most that one use may show; some can do without. `opens`: only as the conversation's first
    pictures.
    """

    make: Callable[[Room], list[Turn]]
    tokens: int
    pictures: int = 0
    fills: bool = False
    opens: bool = False
    may_lack_pictures: bool = False


FAMILIES: Mapping[str, Family] = {
    "facts": Family(facts.fact, 26),
    "sums": Family(sums.sum_of_two, 24),
    "pairs": Family(pairs.key_pairs, 0, fills=True),
    "copies": Family(copies.copy, 0, fills=True),
    "needles": Family(needles.needle, 0, fills=True),
    "last_write": Family(state.last_write, 0, fills=True),
    "mode_word": Family(state.mode_word, 0, fills=True),
    "running_sum": Family(state.running_sum, 0, fills=True),
    "shapes": Family(single_pictures.shape, 40, pictures=1),
    "counts": Family(single_pictures.count, 40, pictures=1),
    "sides": Family(single_pictures.side, 42, pictures=1),
    "numbers": Family(single_pictures.number, 42, pictures=1),
    "digits": Family(single_pictures.digit, 40, pictures=1),
    "words": Family(single_pictures.word, 40, pictures=1),
    "two_pictures": Family(several_pictures.two_pictures, 68, pictures=2),
    "several_pictures": Family(several_pictures.several_pictures, 190, pictures=4, opens=True),
    "far_picture": Family(several_pictures.far_picture, 0, pictures=1, fills=True),
    "second_turns": Family(second_turns.second_turn, 60, pictures=1, may_lack_pictures=True),
    "refusals": Family(refusals.refusal, 44, pictures=1, may_lack_pictures=True),
}

# A task's index here is its id in a batch.
TASKS: tuple[str, ...] = tuple(FAMILIES)

SHORT_MIX: Mapping[str, float] = {
    "facts": 12,
    "sums": 12,
    "pairs": 5,
    "copies": 3,
    "needles": 4,
    "last_write": 3,
    "mode_word": 3,
    "running_sum": 3,
    "shapes": 7,
    "counts": 6,
    "sides": 5,
    "numbers": 12,
    "digits": 4,
    "words": 12,
    "two_pictures": 7,
    "several_pictures": 4,
    "far_picture": 4,
    "second_turns": 4,
    "refusals": 2,
}
LONG_MIX: Mapping[str, float] = {
    "facts": 7,
    "sums": 6,
    "pairs": 17,
    "copies": 5,
    "needles": 15,
    "last_write": 6,
    "mode_word": 4,
    "running_sum": 3,
    "shapes": 4,
    "counts": 3,
    "sides": 3,
    "numbers": 6,
    "digits": 2,
    "words": 6,
    "two_pictures": 4,
    "several_pictures": 4,
    "far_picture": 10,
    "second_turns": 3,
    "refusals": 1,
}
# For short rows of a run that goes on from a trained checkpoint: reading words and numbers is learned last.
PICTURE_MIX: Mapping[str, float] = {
    "facts": 3,
    "sums": 3,
    "pairs": 2,
    "copies": 1,
    "needles": 3,
    "last_write": 1,
    "mode_word": 1,
    "running_sum": 3,
    "shapes": 4,
    "counts": 8,
    "sides": 5,
    "numbers": 18,
    "digits": 5,
    "words": 22,
    "two_pictures": 12,
    "several_pictures": 5,
    "far_picture": 3,
    "second_turns": 6,
    "refusals": 2,
}
LONG_TOKENS = 1024


def default_mix(length: int) -> Mapping[str, float]:
    """Shares of tokens by task for rows of `length` tokens."""
    return LONG_MIX if length >= LONG_TOKENS else SHORT_MIX


def check_mix(mix: Mapping[str, float]) -> None:
    """Raises ValueError for an unknown task or for shares that are not positive in sum."""
    for task, share in mix.items():
        if task not in FAMILIES:
            raise ValueError(f"mix names {task}; tasks are {', '.join(TASKS)}")
        if share < 0:
            raise ValueError(f"mix gives {task} a share of {share}; shares are at least 0")
    if not sum(mix.values()) > 0:
        raise ValueError("mix gives every task a share of 0")
