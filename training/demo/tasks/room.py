"""What a row still has room for, as a task sees it; knows no task."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.demo.chat import Part
from training.demo.picture import Picture


@dataclass
class Room:
    """Where the next turns go: `tokens` and `pictures` still free, the pictures the
    conversation holds already, and whether it has not begun."""

    random: Random
    split: str
    tokens: int
    pictures: int = 6
    pictures_before: int = 0
    at_start: bool = False

    def one_of(self, phrasings: tuple[str, ...]) -> str:
        return self.random.choice(phrasings)

    def beside(self, text: str, *shown: Picture) -> tuple[Part, ...]:
        """The pictures before the text, or after it."""
        if not text:
            return shown
        return (*shown, text) if self.random.random() < 0.6 else (text, *shown)
