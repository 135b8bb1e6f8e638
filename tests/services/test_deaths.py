"""One service ends or dies under load: the caller is told quickly, the others go on, and a restart heals."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from day0.client import chat_request, image_part, text_part
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from protos.router.v1 import router_pb2
from svc_common.errors import ServiceError
from tests.services.conftest import Services
from tests.vision_svc.client import noise

QUICKLY_SECONDS = 10


@pytest.fixture(autouse=True)
def all_are_up(services: Services) -> Iterator[None]:
    """Every test starts with all services up, whatever the one before has killed."""
    services.run(services.restart_the_dead())
    yield


def text(max_tokens: int) -> router_pb2.GenerateRequest:
    return chat_request([text_part("Tell me more.")], sampling=sampling(max_tokens))


def image(seed: int) -> router_pb2.GenerateRequest:
    return chat_request([text_part("look: "), image_part(noise(seed))], sampling=sampling(4))


def sampling(max_tokens: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)


async def until_first_token(stream: AsyncIterator[router_pb2.GenerateResponse]) -> int:
    """Reads up to the first delta; the tokens it carries."""
    async for event in stream:
        if event.WhichOneof("event") == "delta":
            return len(event.delta.token_ids)
    raise AssertionError("no token came")


async def refusal(services: Services, request: router_pb2.GenerateRequest) -> ServiceError:
    began = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        await services.ask(request)
    assert time.monotonic() - began < QUICKLY_SECONDS
    return caught.value


def test_vision_dies_under_an_image_request(services: Services) -> None:
    async def story() -> None:
        assert (await services.ask(image(1))).completion_tokens == 4
        # Held still, so that the request is surely with it when it dies.
        services.kill("vision", signal.SIGSTOP)
        asking = asyncio.ensure_future(refusal(services, image(2)))
        async with asyncio.timeout(QUICKLY_SECONDS):
            while not (await services.llm.GetLoad(llm_pb2.GetLoadRequest())).visual_entries:
                await asyncio.sleep(0.02)
        services.kill("vision", signal.SIGKILL)
        in_flight = await asking
        await services.process("vision").ended()
        errors = [in_flight]
        for seed in range(3, 8):
            errors.append(await refusal(services, image(seed)))
            # At once: the language service is as well as before and must not be taken for lost.
            assert (await services.ask(text(4))).completion_tokens == 4, "text needs no vision service"
        for error in errors:
            assert error.status is grpc.StatusCode.UNAVAILABLE and error.reason == "VISION_UNAVAILABLE"
            assert "image 0" in error.message and "vision service" in error.message
        await services.restart_the_dead()
        async with asyncio.timeout(30):
            while True:
                try:
                    healed = await services.ask(image(2))
                    break
                except ServiceError as error:
                    assert error.status is grpc.StatusCode.UNAVAILABLE
                    await asyncio.sleep(0.2)
        assert healed.completion_tokens == 4 and healed.usage.visual_tokens > 0
        await services.until_all_is_back()

    services.run(story())


def test_llm_dies_in_mid_stream(services: Services) -> None:
    async def story() -> None:
        router = services.process("router").pid
        stream = services.client.generate(text(2000))
        await until_first_token(stream)
        services.kill("llm", signal.SIGKILL)
        with pytest.raises(ServiceError) as caught:
            async with asyncio.timeout(QUICKLY_SECONDS):
                async for _ in stream:
                    pass
        assert caught.value.status is grpc.StatusCode.UNAVAILABLE
        await services.process("llm").ended()
        error = await refusal(services, text(4))
        assert error.status is grpc.StatusCode.UNAVAILABLE and error.reason == "NO_READY_REPLICA"
        assert services.process("llm").plan.target in error.message
        await services.restart_the_dead()
        assert services.process("router").pid == router
        assert (await services.ask(text(8))).completion_tokens == 8
        assert (await services.ask(image(4))).completion_tokens == 4
        await services.until_all_is_back()

    services.run(story())


def test_llm_is_told_to_end_in_mid_stream(services: Services) -> None:
    async def story() -> None:
        tokens = 300
        stream = services.client.generate(text(tokens))
        received = await until_first_token(stream)
        services.kill("llm", signal.SIGTERM)
        await services.until_not_serving("llm")
        error = await refusal(services, text(4))
        assert error.status is grpc.StatusCode.UNAVAILABLE
        assert error.reason in ("DRAINING", "NO_READY_REPLICA")
        assert services.process("llm").runs, "it ended before the stream did"
        kinds = []
        async for event in stream:
            kinds.append(event.WhichOneof("event"))
            received += len(event.delta.token_ids)
        assert received == tokens and kinds[-2:] == ["finished", "usage"]
        async with asyncio.timeout(QUICKLY_SECONDS):
            assert await services.process("llm").ended() == 0

    services.run(story())
