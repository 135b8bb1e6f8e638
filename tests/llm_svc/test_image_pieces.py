"""An image that lies across the pieces of a prefill gives the bits of an uncut prefill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.llm.v1 import llm_pb2
from tests.llm_svc.conftest import picture
from tests.loopback import LlmOnLoopback, completion, ids_part, image_part

# 7 x 7 visual tokens. Less than a block of text stands before the picture, so that no piece runs before it is there:
# whenever it arrives, the pieces end at 32, inside the picture.
SQUARE = picture(3, 196, 196)
WIDE = picture(5, 196, 112)


@pytest.fixture(scope="module")
def uncut(tiny_checkpoint: Path) -> Iterator[LlmOnLoopback]:
    with LlmOnLoopback(tiny_checkpoint, prefill_chunk_tokens=0, prefix_cache=False) as service:
        yield service


@pytest.fixture(scope="module")
def in_pieces(tiny_checkpoint: Path) -> Iterator[LlmOnLoopback]:
    with LlmOnLoopback(tiny_checkpoint, prefill_chunk_tokens=32, prefix_cache=False) as service:
        yield service


def one_image() -> llm_pb2.GenerateRequest:
    return completion(
        ids_part([7] * 10), image_part(SQUARE), ids_part([9, 8] * 30), max_tokens=8, ignore_eos=True, logprobs=20
    )


def two_images() -> llm_pb2.GenerateRequest:
    return completion(
        ids_part([7] * 10),
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
