"""Held-out examples of every score, and their layout as a prompt; knows nothing of the model."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerFast

from training.demo.catalogue import FAMILIES
from training.demo.chat import IMAGE_TOKENS, Turn
from training.demo.draw import PICTURE_PIXELS, Painter
from training.demo.picture import Picture
from training.demo.splits import HELD_OUT
from training.demo.tasks import needles, pairs, several_pictures
from training.demo.tasks.room import Room

DEPTHS = (0.02, 0.25, 0.5, 0.75, 0.98)
ROOM_TOKENS = 900
Content = str | bytes


@dataclass(frozen=True)
class Example:
    """One held-out question: a conversation whose last answer is asked for.

    `messages`: (role, parts), a part is text or the bytes of a PNG of 112 x 112; `answer`: the exact sentence.
    """

    task: str
    messages: tuple[tuple[str, tuple[Content, ...]], ...]
    answer: str


@dataclass(frozen=True)
class Score:
    """How a score's examples are made (from a room and the example's number), and what share must be right, if any."""

    make: Callable[[Room, int], list[Turn]]
    must_reach: float | None


def of_family(name: str, room: Room, number: int) -> list[Turn]:
    """The family's own turns, as in training but from what is held out."""
    return FAMILIES[name].make(room)


def some_pairs(count: int, sentences: bool, room: Room, number: int) -> list[Turn]:
    """One question about a list of `count` pairs."""
    # Held-out names are too few for long lists: the names are training's, the lists are not.
    names_of = HELD_OUT if count <= 128 else "train"
    text, keys = pairs.key_list(room.random, names_of, count, sentences)
    return pairs.ask_keys(room.random, text, keys, 1)


def one_needle(tokens: int, room: Room, number: int) -> list[Turn]:
    """One sentence hidden at one of five depths in turn."""
    hidden = needles.make_needles(room.random, 1)
    return needles.ask_needles(room.random, room.split, tokens - 80, hidden, [DEPTHS[number % len(DEPTHS)]])


def far_picture(text_tokens: int, room: Room, number: int) -> list[Turn]:
    return several_pictures.far_turns(room, 1, text_tokens)


# `pairs_340_at_4k` uses sentences of eleven tokens a pair, `pairs_256_at_2k` the compact form of seven.
SCORES: Mapping[str, Score] = {
    "shapes": Score(partial(of_family, "shapes"), 0.98),
    "counts": Score(partial(of_family, "counts"), 0.97),
    "sides": Score(partial(of_family, "sides"), None),
    "numbers": Score(partial(of_family, "numbers"), 0.97),
    "digits": Score(partial(of_family, "digits"), 0.95),
    "words": Score(partial(of_family, "words"), 0.93),
    "two_pictures": Score(partial(of_family, "two_pictures"), 0.98),
    "several_pictures": Score(partial(of_family, "several_pictures"), None),
    "second_turns": Score(partial(of_family, "second_turns"), 0.95),
    "far_picture_300": Score(partial(far_picture, 300), None),
    "far_picture_1000": Score(partial(far_picture, 1100), 0.90),
    "facts": Score(partial(of_family, "facts"), 0.98),
    "sums": Score(partial(of_family, "sums"), 0.97),
    "pairs_128_at_1k": Score(partial(some_pairs, 128, False), None),
    "pairs_256_at_2k": Score(partial(some_pairs, 256, False), 0.97),
    "pairs_340_at_4k": Score(partial(some_pairs, 340, True), 0.97),
    "copies": Score(partial(of_family, "copies"), None),
    "needle_1k": Score(partial(one_needle, 1000), None),
    "needle_4k": Score(partial(one_needle, 3900), None),
    "needle_8k": Score(partial(one_needle, 8000), 0.97),
    "needle_16k": Score(partial(one_needle, 15_500), None),
    "last_write": Score(partial(of_family, "last_write"), None),
    "mode_word": Score(partial(of_family, "mode_word"), None),
    "running_sum": Score(partial(of_family, "running_sum"), None),
    "refusals": Score(partial(of_family, "refusals"), None),
}
# Smaller rooms for tasks whose examples would otherwise be long lists.
ROOMS = {"copies": 240, "second_turns": 100, "refusals": 100}


@cache
def painter() -> Painter:
    return Painter()


def examples(task: str, count: int, seed: int) -> list[Example]:
    """`count` examples of a score, fixed by the arguments. Raises ValueError for an unknown score."""
    if task not in SCORES:
        raise ValueError(f"task must be one of {', '.join(SCORES)}, got {task}")
    found = []
    for number in range(count):
        random = Random(f"{HELD_OUT} {task} {seed} {number}")
        room = Room(random, HELD_OUT, tokens=ROOMS.get(task, ROOM_TOKENS), at_start=True)
        turns = SCORES[task].make(room, number)
        # A conversation of many questions is asked one of them, the ones before it answered rightly.
        if task in ("last_write", "mode_word", "running_sum"):
            turns = turns[: random.randint(1, len(turns))]
        found.append(as_example(task, turns))
    return found


def as_example(task: str, turns: list[Turn]) -> Example:
    """The last turn is asked, the others are history."""
    messages: list[tuple[str, tuple[Content, ...]]] = []
    for turn in turns:
        if turn.system:
            messages.append(("system", (turn.system,)))
        parts = tuple(png(part) if isinstance(part, Picture) else part for part in turn.user)
        messages.append(("user", tuple(part for part in parts if part)))
        messages.append(("assistant", (turn.answer,)))
    messages.pop()
    return Example(task, tuple(messages), turns[-1].answer)


def png(picture: Picture) -> bytes:
    """The picture as a PNG of 112 x 112."""
    drawn = painter()(picture)
    image = Image.fromarray(drawn)
    colours, index = np.unique(drawn.reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) <= 256:
        # With few colours a palette says the same in fewer bytes.
        image = Image.frombytes("P", image.size, index.astype(np.uint8).tobytes())
        image.putpalette(colours.reshape(-1).tolist())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def chat_messages(example: Example) -> list[dict[str, Any]]:
    """Messages as the chat template takes them, pictures as places only."""
    return [{"role": role, "content": [template_part(part) for part in parts]} for role, parts in example.messages]


def template_part(part: Content) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def render(example: Example, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int], np.ndarray]:
    """Prompt ids as the services lay them out, answer ids with the end token, and pictures uint8 [n, 112, 112, 3].

    The prompt is the chat template's text with its generation prompt; each image token is repeated for its visual
    tokens.
    """
    text = tokenizer.apply_chat_template(chat_messages(example), add_generation_prompt=True, tokenize=False)
    image_id, end = tokenizer.convert_tokens_to_ids(["<|image|>", "<|user|>"])
    ids: list[int] = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        ids += [token] * (IMAGE_TOKENS if token == image_id else 1)
    answer = [*tokenizer(example.answer, add_special_tokens=False)["input_ids"], end]
    return ids, answer, pixels(example)


def pixels(example: Example) -> np.ndarray:
    """The example's pictures, uint8 [n, 112, 112, 3]."""
    shown = [
        np.asarray(Image.open(io.BytesIO(part)).convert("RGB"))
        for _, parts in example.messages
        for part in parts
        if isinstance(part, bytes)
    ]
    return np.stack(shown) if shown else np.zeros((0, PICTURE_PIXELS, PICTURE_PIXELS, 3), dtype=np.uint8)
