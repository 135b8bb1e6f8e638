"""Prompts whose answers must not depend on how they are computed; runs nothing."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ImageOps

from day0.align.case import picture, plain_ids
from llm_svc.core import ImageSpan, Prompt, VisualTokens
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings
from vision_svc.encoder import EncodeError, Encoder
from vision_svc.processor import PatchProcessor

_BEFORE_PICTURE = 5


@dataclass(frozen=True, slots=True)
class Prompts:
    """`single` are independent of each other. `beginning` and `continued` share their first tokens and no more;
    `picture` and `other_picture` have the same ids and differ in the picture alone (None where there is no vision).
    """

    single: dict[str, Prompt]
    beginning: Prompt
    continued: Prompt
    picture: Prompt | None
    other_picture: Prompt | None

    def by_name(self) -> dict[str, Prompt]:
        """All of them."""
        found = {**self.single, "beginning": self.beginning, "continued": self.continued}
        if self.picture is not None and self.other_picture is not None:
            found |= {"picture": self.picture, "other picture": self.other_picture}
        return found


def make_prompts(folder: Path, config: Any, block_size: int) -> Prompts:
    """One shorter than a block, one longer than a query may attend to, and the pairs."""
    reach = int(getattr(config.get_text_config(), "index_topk", 0) or 64)
    ids = plain_ids(config, 2 * reach + 4 * block_size + 7)
    long = ids[: 2 * reach + 2 * block_size + 7]
    shared = (len(long) // 2) // block_size * block_size + 3
    continued = [*long[:shared], *reversed(ids[-2 * block_size :])]
    first, second = _pictures(folder, config)
    with_pictures = [
        None if visual is None else _with_picture(ids, visual, config.image_token_id, 3 * block_size)
        for visual in (first, second)
    ]
    return Prompts(
        {"short": Prompt(tuple(ids[-block_size + 3 :])), "long": Prompt(tuple(reversed(long)))},
        Prompt(tuple(long)),
        Prompt(tuple(continued)),
        *with_pictures,
    )


def _with_picture(ids: list[int], visual: VisualTokens, placeholder: int, after: int) -> Prompt:
    before = ids[:_BEFORE_PICTURE]
    all_ids = (*before, *[placeholder] * visual.count, *ids[_BEFORE_PICTURE : _BEFORE_PICTURE + after])
    return Prompt(all_ids, (ImageSpan(_BEFORE_PICTURE, visual),))


def _pictures(folder: Path, config: Any) -> tuple[VisualTokens | None, VisualTokens | None]:
    """A picture and its mirror image through the vision service's tower."""
    if getattr(config, "vision_config", None) is None:
        return None, None
    with closing(open_source(LlmSettings(model=str(folder)))) as source:
        encoder = Encoder(source, dtype="float32", batch_invariant=True)
    processor, found = PatchProcessor(folder), []
    for image in (picture(), ImageOps.mirror(picture())):
        (encoded,) = encoder.encode([processor(image)])
        if isinstance(encoded, EncodeError):
            raise encoded
        rows = np.frombuffer(encoded.data, dtype=np.float32).reshape(encoded.tokens, encoded.hidden).copy()
        found.append(VisualTokens(hashlib.sha256(image.tobytes()).digest(), encoded.tokens, rows))
    return found[0], found[1]
