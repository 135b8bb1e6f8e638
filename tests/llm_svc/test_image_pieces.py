"""An image that lies across the pieces of a prefill gives the bits of an uncut prefill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.llm.v1 import llm_pb2
from tests.llm_svc.conftest import picture
from tests.loopback import LlmOnLoopback, completion, ids_part, image_part

# 7 x 7 visual tokens.
SQUARE = picture(3, 196, 196)
WIDE = picture(5, 196, 112)


@pytest.fixture(scope="module")
def uncut(tiny_checkpoint: Path) -> Iterator[LlmOnLoopback]:
    with LlmOnLoopback(tiny_checkpoint, prefill_chunk_tokens=0, prefix_cache=False) as service:
        yield service


@pytest.fixture(scope="module")
def in_pieces(tiny_checkpoint: Path) -> Iterator[LlmOnLoopback]:
    with LlmOnLoopback(tiny_checkpoint, prefill_chunk_tokens=64, prefix_cache=False) as service:
        yield service


def one_image() -> llm_pb2.GenerateRequest:
    return completion(
        ids_part([7] * 49), image_part(SQUARE), ids_part([9, 8]), max_tokens=8, ignore_eos=True, logprobs=20
    )


def two_images() -> llm_pb2.GenerateRequest:
    return completion(
        ids_part([7] * 20),
        image_part(SQUARE),
        ids_part([5] * 3),
        image_part(WIDE),
        ids_part([9, 8]),
        max_tokens=8,
        ignore_eos=True,
        logprobs=20,
    )


@pytest.mark.parametrize("make", [one_image, two_images])
def test_logits_equal_those_of_an_uncut_prefill(uncut: LlmOnLoopback, in_pieces: LlmOnLoopback, make) -> None:
    whole, cut = uncut.ask(make()), in_pieces.ask(make())
    assert whole.usage is not None and whole.usage.prompt_tokens > 64
    assert whole.usage.visual_tokens == 49 + (28 if make is two_images else 0)
    assert cut.logprobs == whole.logprobs
    assert cut.ids == whole.ids


def test_the_second_piece_does_not_start_with_the_first_visual_token_again(in_pieces: LlmOnLoopback) -> None:
    """A picture of another lower half, which only the second piece sees, gives other logits."""
    from io import BytesIO

    from PIL import Image

    changed = Image.open(BytesIO(SQUARE)).convert("RGB")
    # The last three of seven rows of visual tokens: positions 50 + 28 and on, behind the cut at 64.
    changed.paste((255, 255, 255), (0, 112, 196, 196))
    out = BytesIO()
    changed.save(out, "PNG")
    request = one_image()
    request.completion.parts[1].image.data = out.getvalue()
    assert in_pieces.ask(request).logprobs != in_pieces.ask(one_image()).logprobs
