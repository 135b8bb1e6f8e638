"""A conversation as the tasks write it, and as token ids; knows no task and no picture's content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer

from training.demo.picture import Picture

IMAGE_TOKENS = 16
Part = str | Picture

SEGMENT_MEMORY = 200_000
SHORT_SEGMENT_CHARACTERS = 64


@dataclass(frozen=True)
class Turn:
    """One question and its answer; `system` may only be set on the first turn of a conversation."""

    task: str
    user: tuple[Part, ...]
    answer: str
    system: str = ""


class Encoder:
    """Turns of a conversation to ids; equal to the chat template's text through the whole tokenizer.

    Special tokens cut the text before the merges do, so a piece between two of them can be encoded alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._memory: dict[str, list[int]] = {}

        @cache
        def special(token: str) -> int:
            found = tokenizer.token_to_id(token)
            if found is None:
                raise ValueError(f"the tokenizer has no token {token}")
            return found

        self.special = special
        self.prefix = [special("[gMASK]"), special("<sop>")]
        self.end = special("<|user|>")
        self.padding = special("<|endoftext|>")
        self.image = special("<|image|>")
        self._image_run = [
            special("<|begin_of_image|>"),
            *[self.image] * IMAGE_TOKENS,
            special("<|end_of_image|>"),
        ]

    def text(self, piece: str) -> list[int]:
        """Ids of a piece without special tokens; short pieces are remembered."""
        if len(piece) > SHORT_SEGMENT_CHARACTERS:
            return self._tokenizer.encode(piece, add_special_tokens=False).ids
        found = self._memory.get(piece)
        if found is None:
            if len(self._memory) >= SEGMENT_MEMORY:
                self._memory.clear()
            found = self._memory[piece] = self._tokenizer.encode(piece, add_special_tokens=False).ids
        return found

    def question(self, turn: Turn) -> list[int]:
        """From <|system|> or <|user|> to the line break after <|assistant|>."""
        ids = [self.special("<|system|>"), *self.text("\n" + turn.system)] if turn.system else []
        ids.append(self.special("<|user|>"))
        pending = "\n"
        for part in turn.user:
            if isinstance(part, str):
                pending += part
                continue
            if pending:
                ids += self.text(pending)
            ids += self._image_run
            pending = ""
        if pending:
            ids += self.text(pending)
        ids.append(self.special("<|assistant|>"))
        ids += self.text("\n")
        return ids

    def answer(self, turn: Turn) -> list[int]:
        """Ids of the answer and the end token."""
        return [*self.text("\n" + turn.answer)[1:], self.end]


def pictures(turns: Sequence[Turn]) -> list[Picture]:
    """All pictures of the turns, in order."""
    return [part for turn in turns for part in turn.user if isinstance(part, Picture)]
