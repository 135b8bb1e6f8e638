"""A long list of invented names and their keys, then many questions: only attention can look them up."""

from __future__ import annotations

from random import Random

from training.demo.chat import Turn
from training.demo.lexicon import names
from training.demo.tasks.room import Room

MAX_PAIRS = 511
COMPACT_TOKENS = 7.1
SENTENCE_TOKENS = 11.2
FIRST_QUESTION_TOKENS = 42
QUESTION_TOKENS = 26

INTRODUCTIONS = (
    "Here is a list of keys:",
    "These are the keys:",
    "Remember these keys:",
    "A list of names and their keys:",
)
PHRASINGS = (
    "What is the key of {name}?",
    "Which key belongs to {name}?",
    "Tell me the key of {name}.",
    "What key does {name} have?",
    "{name}?",
    "And {name}?",
)


def key_list(random: Random, split: str, count: int, sentences: bool) -> tuple[str, dict[str, str]]:
    """The list as one text, and the key of each name. Names are distinct and the split's own."""
    keys = {name: str(random.randrange(100, 1000)) for name in random.sample(names(split), count)}
    if sentences:
        return " ".join(f"The key of {name} is {key}." for name, key in keys.items()), keys
    return ", ".join(f"{name} {key}" for name, key in keys.items()) + ".", keys


def key_pairs(room: Room) -> list[Turn]:
    """As many pairs as fit into part of the room, and questions about them in the rest."""
    random = room.random
    sentences = random.random() < 0.3
    for_list = random.uniform(0.35, 0.8) * (room.tokens - FIRST_QUESTION_TOKENS)
    most = min(MAX_PAIRS, len(names(room.split)))
    count = int(min(max(for_list / (SENTENCE_TOKENS if sentences else COMPACT_TOKENS), 3), most))
    text, keys = key_list(random, room.split, count, sentences)
    used = count * (SENTENCE_TOKENS if sentences else COMPACT_TOKENS) + FIRST_QUESTION_TOKENS
    questions = 1 + int(max(room.tokens - used, 0) / QUESTION_TOKENS)
    return ask_keys(random, text, keys, min(questions, 120))


def ask_keys(random: Random, text: str, keys: dict[str, str], questions: int) -> list[Turn]:
    """The list with its first question, then the other questions, each a turn."""
    asked = random.sample(sorted(keys), min(questions, len(keys)))
    turns = []
    for index, name in enumerate(asked):
        # The short forms make sense only once the question is known.
        question = random.choice(PHRASINGS if index else PHRASINGS[:4]).format(name=name)
        if index == 0:
            introduction = random.choice(INTRODUCTIONS)
            question = random.choice((f"{introduction} {text} {question}", f"{introduction}\n{text}\n{question}"))
        turns.append(Turn("pairs", (question,), f"The key of {name} is {keys[name]}."))
    return turns
