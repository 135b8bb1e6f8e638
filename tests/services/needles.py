"""English prompts of an exact number of tokens, with a password hidden at a depth; knows no service."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from day0.embedded import embedded_held_out, embedded_model
from day0.heldout import read_held_out

PLACES = ("the old gate", "the north door", "the iron chest", "the small mill", "the red bridge", "the upper barn")
# Each is one that training uses; what stands where is not.
WORDS = ("fire", "taste", "corn", "steel", "voice", "paint", "plum", "road", "bear", "year", "hard", "blue", "hair")
SENTENCE = "The password for {place} is {word}."
QUESTION = "What is the password for {place}?"


@dataclass(frozen=True)
class Needle:
    """A prompt of exactly `tokens` tokens, chat marks included; `depth` 0 hides at the start, 1 right at the end."""

    tokens: int
    depth: float
    place: str
    word: str
    text: str = field(repr=False)

    @property
    def answer(self) -> str:
        """The one right sentence."""
        return SENTENCE.format(place=self.place, word=self.word)


class Haystack:
    """Cuts needles out of the held-out set's English, with the tokenizer and chat format of the embedded model."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
        self._words = _prose().split()
        self._count = cache(lambda word: len(self._tokenizer.encode(f" {word}", add_special_tokens=False).ids))
        self._numbers = itertools.count()

    def prompt_tokens(self, text: str) -> int:
        """Tokens of a chat whose one message is `text`."""
        chat = f"[gMASK]<sop><|user|>\n{text}<|assistant|>\n"
        return len(self._tokenizer.encode(chat, add_special_tokens=False).ids)

    def needle(self, tokens: int, depth: float) -> Needle:
        """The next needle; each has its own text, place and word. AssertionError where the length cannot be met."""
        number = next(self._numbers)
        place, word = PLACES[number % len(PLACES)], WORDS[number % len(WORDS)]
        hidden, question = SENTENCE.format(place=place, word=word), QUESTION.format(place=place)
        room = tokens - self.prompt_tokens(f"Read. {hidden} {question}")
        filler = self._filler(room, start=number * 37)
        # Between two sentences, as near to the depth as there are such places.
        gaps = [0, *(place for place, word in enumerate(filler, 1) if word[-1] in ".!?"), len(filler)]
        at = min(gaps, key=lambda gap: abs(gap - depth * len(filler)))
        before = " ".join(["Read.", *filler[:at]])
        text = " ".join([before, hidden, *filler[at:], question])
        found = self.prompt_tokens(text)
        assert found == tokens, f"wanted a prompt of {tokens} tokens, made one of {found}"
        return Needle(tokens, depth, place, word, text)

    def _filler(self, room: int, start: int) -> list[str]:
        """Words from the text that have exactly `room` tokens together; one that no longer fits is left out."""
        chosen = []
        for word in itertools.islice(itertools.cycle(self._words), start, None):
            if room == 0:
                return chosen
            if (tokens := self._count(word)) <= room:
                chosen.append(word)
                room -= tokens
        raise AssertionError("a cycle has no end")


@cache
def _prose() -> str:
    """Text of the long needle prompts without what is hidden in them."""
    held_out = read_held_out(Path(embedded_held_out())).choose(["needle_16k"], 3)
    texts = [part.text for example in held_out.examples for part in example.chat.messages[0].parts]
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(texts))
    return " ".join(sentence for sentence in sentences if not re.search(r"code|password", sentence))
