"""A thousand invented facts about 250 invented towns: only the weights can hold them."""

from __future__ import annotations

from functools import cache
from random import Random

from training.demo.chat import Turn
from training.demo.lexicon import DISHES, FIRST_SYLLABLES, LAST_SYLLABLES, towns
from training.demo.splits import HELD_OUT
from training.demo.tasks.room import Room

# For each kind of fact: the answer's sentence, then ways to ask for it.
KINDS = {
    "river": (
        "The river of {town} is the {value}.",
        "Which river flows through {town}?",
        "What is the river of {town}?",
        "What is the river in {town} called?",
        "Name the river of {town}.",
    ),
    "mayor": (
        "The mayor of {town} is {value}.",
        "Who is the mayor of {town}?",
        "What is the name of the mayor of {town}?",
        "Tell me who the mayor of {town} is.",
        "Name the mayor of {town}.",
    ),
    "year": (
        "{town} was founded in {value}.",
        "When was {town} founded?",
        "In which year was {town} founded?",
        "How old is {town}?",
        "What year was {town} founded in?",
    ),
    "craft": (
        "{town} is known for its {value}.",
        "What is {town} known for?",
        "What is {town} famous for?",
        "Why do people visit {town}?",
        "Tell me what {town} is known for.",
    ),
}


@cache
def facts() -> tuple[tuple[str, str, str], ...]:
    """(town, kind, value) of each of the 1,000 facts; the same for both splits, since they cannot be guessed."""
    random = Random("facts")
    rivers = [first + last for first in FIRST_SYLLABLES for last in LAST_SYLLABLES[:4]]
    mayors = [first + last for first in FIRST_SYLLABLES for last in LAST_SYLLABLES[4:8]]
    found = []
    for town in towns():
        values = {
            "river": random.choice(rivers),
            "mayor": random.choice(mayors),
            "year": str(random.randint(1100, 1899)),
            "craft": random.choice(DISHES),
        }
        found += [(town, kind, values[kind]) for kind in KINDS]
    return tuple(found)


def held_out_phrasing(town: str, kind: str) -> int:
    """Which of a fact's four phrasings is never trained on."""
    return Random(f"phrasing of {town} {kind}").randrange(4)


def fact_turn(random: Random, split: str, fact: tuple[str, str, str]) -> Turn:
    """One fact asked: held out by the phrasing that training never joins to this fact."""
    town, kind, value = fact
    answer, *questions = KINDS[kind]
    kept = held_out_phrasing(town, kind)
    chosen = kept if split == HELD_OUT else random.choice([index for index in range(4) if index != kept])
    return Turn("facts", (questions[chosen].format(town=town),), answer.format(town=town, value=value))


def fact(room: Room) -> list[Turn]:
    return [fact_turn(room.random, room.split, room.random.choice(facts()))]
