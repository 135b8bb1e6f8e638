"""Says which facts of the world are kept from training; knows nothing of tasks or pictures.

A split is "train" or "held_out". What is held out by name (sums, names, numbers) is chosen by a checksum, so that every
process agrees without a list.
"""

from __future__ import annotations

import zlib

TRAIN = "train"
HELD_OUT = "held_out"
SPLITS = (TRAIN, HELD_OUT)
HELD_OUT_TENTHS = 1


def split_of(kind: str, key: str) -> str:
    """The split that may use `key` of a `kind` of thing; one tenth of each kind is held out."""
    return HELD_OUT if zlib.crc32(f"{kind}:{key}".encode()) % 10 < HELD_OUT_TENTHS else TRAIN


def check_split(split: str) -> None:
    """Raises ValueError where `split` is neither of the two."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split}")
