"""Sentences with a code or a password hidden in real English text, then questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.demo.chat import Turn
from training.demo.lexicon import PLACES, passwords
from training.demo.prose import CHARACTERS_PER_TOKEN, sentences
from training.demo.tasks.room import Room

QUESTION_TOKENS = 34

# Each kind: the answer's sentence, ways to hide it, ways to ask for it.
KINDS = {
    "code": (
        "The code for {place} is {value}.",
        (
            "The code for {place} is {value}.",
            "By the way, the code for {place} is {value}.",
            "Remember that {place} opens with the code {value}.",
            "Somebody had written down {value}, the code for {place}.",
            "To open {place} one needs the code {value}.",
            "She whispered that {value} was the code for {place}.",
        ),
        (
            "What is the code for {place}?",
            "Which code opens {place}?",
            "What code is needed for {place}?",
            "The text names a code for {place}. What is it?",
            "How do I open {place}?",
        ),
    ),
    "password": (
        "The password for {place} is {value}.",
        (
            "The password for {place} is {value}.",
            "Nobody knew that the password for {place} was {value}.",
            "At {place} you must say the password {value}.",
            "The guard at {place} waits for the password {value}.",
            "He chose the word {value}, the password for {place}.",
        ),
        (
            "What is the password for {place}?",
            "Which password does one need at {place}?",
            "What must I say at {place}?",
            "The text names a password for {place}. What is it?",
        ),
    ),
}
INTRODUCTIONS = ("", "", "Read this text. ", "Here is a text: ", "Please read: ")


@dataclass(frozen=True)
class Needle:
    """One hidden statement: a code or a password of a place."""

    kind: str
    place: str
    value: str

    def hidden(self, random: Random) -> str:
        return random.choice(KINDS[self.kind][1]).format(place=self.place, value=self.value)

    def question(self, random: Random) -> str:
        return random.choice(KINDS[self.kind][2]).format(place=self.place)

    @property
    def answer(self) -> str:
        return KINDS[self.kind][0].format(place=self.place, value=self.value)


def make_needles(random: Random, count: int) -> list[Needle]:
    """Needles about different places."""
    needles = []
    for place in random.sample(PLACES, count):
        kind = random.choice(tuple(KINDS))
        value = str(random.randrange(1000, 10000)) if kind == "code" else random.choice(passwords())
        needles.append(Needle(kind, place, value))
    return needles


def haystack(random: Random, split: str, tokens: float, hidden: list[tuple[float, str]]) -> str:
    """Real text of about `tokens` tokens with each hidden sentence at its depth, 0 the start and 1 the end."""
    lines = sentences(random, split, int(tokens * CHARACTERS_PER_TOKEN))
    lengths = [len(line) + 1 for line in lines]
    total = sum(lengths)
    places: list[list[str]] = [[] for _ in range(len(lines) + 1)]
    for depth, sentence in hidden:
        passed, index = 0, 0
        while index < len(lines) and passed + lengths[index] / 2 < depth * total:
            passed += lengths[index]
            index += 1
        places[index].append(sentence)
    found = list(places[0])
    for line, after in zip(lines, places[1:], strict=True):
        found += [line, *after]
    return " ".join(found)


def needle(room: Room) -> list[Turn]:
    """A text with up to twelve needles that takes most of the room, and a question for each."""
    random = room.random
    count = min(random.randint(1, 12), max((room.tokens - 60) // 90, 1))
    needles = make_needles(random, count)
    tokens = max(room.tokens * random.uniform(0.6, 1.0) - count * (QUESTION_TOKENS + 18) - 20, 20)
    return ask_needles(random, room.split, tokens, needles, [random.random() for _ in needles])


def ask_needles(random: Random, split: str, tokens: float, needles: list[Needle], depths: list[float]) -> list[Turn]:
    """The text with its first question, then a turn for each other needle."""
    hidden = [(depth, item.hidden(random)) for depth, item in zip(depths, needles, strict=True)]
    text = haystack(random, split, tokens, hidden)
    asked = random.sample(needles, len(needles))
    turns = []
    for index, item in enumerate(asked):
        question = item.question(random)
        if index == 0:
            introduction = random.choice(INTRODUCTIONS)
            joint = random.choice((" ", "\n", "\n\n"))
            question = (
                f"{introduction}{text}{joint}{question}"
                if introduction or random.random() < 0.7
                else f"{question}{joint}{text}"
            )
        turns.append(Turn("needles", (question,), item.answer))
    return turns
