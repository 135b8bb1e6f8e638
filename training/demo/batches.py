"""Batches of training rows as arrays; knows nothing of processes or of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np

from training.demo.catalogue import TASKS, check_mix, default_mix
from training.demo.chat import IMAGE_TOKENS, Encoder
from training.demo.draw import PICTURE_PIXELS, Painter
from training.demo.picture import Picture
from training.demo.rows import RowBuilder
from training.demo.splits import TRAIN, check_split
from training.demo.tokenizer import load_core

__all__ = ["TASKS", "Batch", "make_batch"]


@dataclass
class Batch:
    """B rows of L ids and N places for pictures.

    `ids` int32 [B, L], padded at the right with <|endoftext|>; `task` int8 [B, L]: the task id where `ids[b, t]` is an
    answer token to be predicted, its end token included, else -1; `images` uint8 [N, 112, 112, 3], RGB; `image_slots`
    int32 [N, 16]: flat positions `b * L + t` of a picture's placeholders, -1 throughout where a place is unused.
    """

    ids: np.ndarray
    task: np.ndarray
    images: np.ndarray
    image_slots: np.ndarray


@cache
def encoder() -> Encoder:
    """The encoder of this process."""
    return Encoder(load_core())


@cache
def painter() -> Painter:
    """The painter of this process, with its faces loaded."""
    return Painter()


def make_batch(
    seed: int,
    length: int,
    rows: int,
    max_images: int,
    split: str = TRAIN,
    mix: Mapping[str, float] | None = None,
    paint: Callable[[Picture], np.ndarray | int] | None = None,
) -> Batch:
    """One batch of `rows` rows of `length` tokens with at most `max_images` pictures, fixed by the arguments.

    `mix` gives tasks their shares of the tokens; without it, the default of that length. `paint` draws the pictures;
    without it, the process's painter does. Raises ValueError for lengths under 64, unknown splits and tasks.
    """
    if length < 64:
        raise ValueError(f"length must be at least 64, got {length}")
    check_split(split)
    shares = mix if mix is not None else default_mix(length)
    check_mix(shares)
    encode = encoder()
    builder = RowBuilder(encode, length, split, shares)
    random = Random(f"{split} {seed} {length} {rows} {max_images}")
    batch = Batch(
        ids=np.full((rows, length), encode.padding, dtype=np.int32),
        task=np.full((rows, length), -1, dtype=np.int8),
        images=np.zeros((max_images, PICTURE_PIXELS, PICTURE_PIXELS, 3), dtype=np.uint8),
        image_slots=np.full((max_images, IMAGE_TOKENS), -1, dtype=np.int32),
    )
    shown: list[Picture] = []
    for index in range(rows):
        # What a row leaves unused, the later ones may use.
        row = builder.row(random, -(-(max_images - len(shown)) // (rows - index)))
        batch.ids[index, : len(row.ids)] = row.ids
        batch.task[index, : len(row.task)] = row.task
        shown += row.shown
    places = np.flatnonzero(batch.ids.reshape(-1) == encode.image)
    batch.image_slots[: len(shown)] = places.reshape(len(shown), IMAGE_TOKENS)
    paint = paint or painter()
    for index, picture in enumerate(shown):
        batch.images[index] = paint(picture)
    return batch
