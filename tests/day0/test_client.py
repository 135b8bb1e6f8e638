"""The client builds requests, keeps times and passes faults on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from day0.client import Answer, RouterClient, chat_request, completion_request, image_part, text_part
from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2
from svc_common.errors import DeadlineExceeded, InvalidArgument, Unavailable


def test_parts_keep_their_order_and_source(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"png")
    request = chat_request([text_part("x"), image_part(file), image_part(b"raw"), image_part("data:,y")], system="s")
    system, user = request.chat.messages
    assert (system.role, system.parts[0].text) == (common_pb2.ROLE_SYSTEM, "s")
    assert [part.WhichOneof("content") for part in user.parts] == ["text", "image", "image", "image"]
    assert (user.parts[1].image.data, user.parts[1].image.label) == (b"png", "a.png")
    assert user.parts[2].image.data == b"raw"
    assert user.parts[3].image.url == "data:,y"


def test_completion_has_no_chat() -> None:
    request = completion_request([text_part("x")], model="m")
    assert (request.WhichOneof("input"), request.model) == ("completion", "m")


async def test_answer_is_put_together(router) -> None:
    seen: list[tuple[int, str]] = []
    async with RouterClient(router.target) as client:
        request = chat_request([text_part("q")])
        answer = await client.ask(request, on_text=lambda choice, text: seen.append((choice, text)))
    assert answer.text == "Paris is it\x1b[31m."
    assert seen == [(0, piece) for piece in router.pieces]
    assert answer.token_ids == {0: [0, 10, 1, 11, 2, 12, 3, 13]}
    assert (answer.request_id, answer.reasons) == ("r-1", {0: "stop"})
    assert answer.usage is not None and answer.usage.visual_tokens == 12
    assert answer.completion_tokens == 8
    assert answer.ttft_seconds is not None and 0 < answer.ttft_seconds <= answer.e2e_seconds


def test_times_of_an_answer() -> None:
    answer = Answer(sent_seconds=10.0)
    for at, count in ((10.5, 1), (10.75, 2), (11.5, 2)):
        answer.add(router_pb2.GenerateResponse(delta=common_pb2.Delta(token_ids=[0] * count)), at)
    # A delta that only flushes text is no token.
    answer.add(router_pb2.GenerateResponse(delta=common_pb2.Delta(text="x")), 12.0)
    answer.finished_seconds = 12.5
    assert answer.ttft_seconds == 0.5
    assert answer.itl_seconds == [0.25, 0.75]
    assert answer.tpot_seconds == 0.25
    assert answer.tokens_per_second == 4
    assert answer.e2e_seconds == 2.5


def test_one_token_has_no_rate() -> None:
    answer = Answer(sent_seconds=0.0)
    assert (answer.ttft_seconds, answer.tpot_seconds, answer.itl_seconds) == (None, None, [])
    answer.add(router_pb2.GenerateResponse(delta=common_pb2.Delta(token_ids=[1])), 1.0)
    assert (answer.ttft_seconds, answer.tpot_seconds, answer.tokens_per_second) == (1.0, None, None)


async def test_refusal_keeps_field_limit_and_value(router) -> None:
    async with RouterClient(router.target) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.ask(chat_request([text_part("refuse")]))
        assert (caught.value.field, caught.value.limit, caught.value.value) == ("max_tokens", "10", "11")
        assert (await client.ask(chat_request([text_part("q")]))).text


async def test_leaving_the_stream_cancels(router) -> None:
    async with RouterClient(router.target) as client:
        events = client.generate(chat_request([text_part("wait")]))
        async for event in events:
            if event.WhichOneof("event") == "delta":
                break
        await events.aclose()
        await asyncio.wait_for(router.cancelled.wait(), 10)


async def test_timeout_is_the_callers(router) -> None:
    async with RouterClient(router.target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.ask(chat_request([text_part("wait")]), timeout_seconds=0.3)


async def test_models(router) -> None:
    async with RouterClient(router.target) as client:
        assert [model.model for model in await client.list_models()] == ["m"]
        assert (await client.model_info("other")).model == "other"


async def test_nobody_there() -> None:
    async with RouterClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.list_models(timeout_seconds=5)
