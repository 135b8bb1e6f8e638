"""A sentence hidden in English text is found at every depth, on both sides of index_topk, at every residue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from day0.client import Answer, chat_request, text_part
from day0.embedded import embedded_model
from protos.common.v1.common_pb2 import SamplingParams
from tests.services.conftest import Services
from tests.services.needles import Haystack, Needle

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
pytestmark = pytest.mark.slow
INDEX_TOPK, POOL, BLOCK = 256, 4, 64
IN_FLIGHT = 6


@pytest.fixture(scope="module")
def embedded_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """The three services on the model that comes along."""
    with Services(embedded_model(), tmp_path_factory.mktemp("embedded")) as running:
        yield running


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack()


def missed(services: Services, needles: list[Needle]) -> list[tuple[Needle, str]]:
    """Asks about all, several at a time; those whose answer is not the sentence, with what was said."""
    waiting = iter(needles)
    wrong: list[tuple[Needle, str]] = []

    async def ask_in_turn() -> None:
        for needle in waiting:
            sampling = SamplingParams(temperature=0, max_tokens=24)
            answer: Answer = await services.ask(chat_request([text_part(needle.text)], sampling=sampling))
            assert answer.usage is not None and answer.usage.prompt_tokens == needle.tokens
            if answer.text.strip() != needle.answer:
                wrong.append((needle, answer.text))

    async def all_of_them() -> None:
        await asyncio.gather(*(ask_in_turn() for _ in range(IN_FLIGHT)))

    services.run(all_of_them())
    return wrong


def test_around_index_topk(embedded_services: Services, haystack: Haystack) -> None:
    """Below it every position is attended to, above it some are chosen; an answer of ten tokens crosses it too."""
    lengths = range(INDEX_TOPK - 6, INDEX_TOPK + 7)
    needles = [haystack.needle(tokens, depth) for tokens in lengths for depth in DEPTHS]
    assert missed(embedded_services, needles) == []


def test_every_residue_of_pool_and_block(embedded_services: Services, haystack: Haystack) -> None:
    """Prompts of twice what is chosen; 64 lengths in a row have every residue, the depths go round among them."""
    lengths = range(2 * INDEX_TOPK + POOL, 2 * INDEX_TOPK + POOL + BLOCK)
    needles = [haystack.needle(tokens, DEPTHS[place % len(DEPTHS)]) for place, tokens in enumerate(lengths)]
    assert {needle.tokens % BLOCK for needle in needles} == set(range(BLOCK))
    assert missed(embedded_services, needles) == []


@pytest.mark.parametrize("tokens", [2047, 2050])
def test_far_beyond_index_topk(embedded_services: Services, haystack: Haystack, tokens: int) -> None:
    """An eighth of the text can be chosen: without a trained indexer the needle is rarely in it."""
    assert missed(embedded_services, [haystack.needle(tokens, depth) for depth in DEPTHS]) == []
