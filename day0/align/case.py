"""Prompts that reach every part of a definition, as both sides take them; compares nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from llm_svc.core import ImageSpan, Prompt, PromptTokens, Request, SamplingParams, Sequence, VisualTokens

SEED = 20
DECODE_STEPS = 6
_PICTURE_WIDTH, _PICTURE_HEIGHT = 140, 98


@dataclass(frozen=True, slots=True)
class Case:
    """`ids` are the prompt and the tokens that follow it; the last `decodes` of them are fed one at a time.

    `chunk_tokens` cuts the prompt, 0 leaves it whole. `images` are places of pictures.
    """

    name: str
    ids: tuple[int, ...]
    decodes: int
    chunk_tokens: int
    images: tuple[ImageSpan, ...] = ()

    def sequence(self) -> Sequence:
        """Ready to be scheduled; the caller appends the tokens that follow."""
        prompt = self.ids[: len(self.ids) - self.decodes]
        request = Request(self.name, (PromptTokens(prompt),), (), SamplingParams(max_tokens=self.decodes + 1))
        return Sequence(request, Prompt(prompt, self.images))


def picture() -> Image.Image:
    """Shapes and a gradient, so that no two patches are alike."""
    image = Image.new("RGB", (_PICTURE_WIDTH, _PICTURE_HEIGHT))
    image.putdata(
        [
            (x * 255 // _PICTURE_WIDTH, y * 255 // _PICTURE_HEIGHT, (x * y) % 256)
            for y in range(_PICTURE_HEIGHT)
            for x in range(_PICTURE_WIDTH)
        ]
    )
    draw = ImageDraw.Draw(image)
    draw.ellipse((20, 15, 70, 60), fill=(250, 40, 20))
    draw.rectangle((80, 50, 130, 90), fill=(10, 200, 120))
    return image


def plain_ids(config: Any, count: int) -> list[int]:
    """Random ids that stand for no image and no control token, the same each time."""
    special = {value for name, value in vars(config).items() if name.endswith("_token_id") and isinstance(value, int)}
    generator = torch.Generator().manual_seed(SEED)
    # The highest ids are where tokenizers keep control tokens.
    most = int(config.get_text_config().vocab_size * 0.9)
    drawn = torch.randint(0, most, (count + 8 * len(special),), generator=generator).tolist()
    return [token for token in drawn if token not in special][:count]


def make_cases(config: Any, visual_rows: Tensor | None, block_size: int) -> list[Case]:
    """Text whole, text in chunks and then token by token, and a picture in the middle, in chunks as well.

    The texts are longer than what one query may attend to, and end inside a pool and inside a block.
    """
    text = config.get_text_config()
    reach = int(getattr(text, "index_topk", 0) or 64)
    length = 2 * reach + 2 * block_size + 7
    ids = tuple(plain_ids(config, length + DECODE_STEPS))
    chunk = max(block_size, length // 3 // block_size * block_size)
    cases = [
        Case("text", ids[:length], 0, 0),
        Case("text in chunks, then token by token", ids, DECODE_STEPS, chunk),
    ]
    if visual_rows is not None:
        count = len(visual_rows)
        digest = hashlib.sha256(visual_rows.numpy().tobytes()).digest()
        span = ImageSpan(5, VisualTokens(digest, count, visual_rows.numpy()))
        with_picture = (*ids[:5], *[config.image_token_id] * count, *ids[5 : 5 + reach + 30])
        cases.append(Case("picture and text", with_picture, 3, chunk, (span,)))
    return cases


def embeddings(embed_tokens: Any, case: Case, visual: Rows[Tensor]) -> Tensor:
    """Upstream's own: [1, tokens, hidden] with upstream's visual tokens in their places."""
    rows: Tensor = embed_tokens(torch.tensor(case.ids))
    for span, found in zip(case.images, visual, strict=True):
        rows[span.start : span.end] = found.to(rows)
    return rows[None]
