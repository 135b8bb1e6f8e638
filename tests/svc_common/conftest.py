"""Real servers on loopback for the tests of svc_common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.channel import open_channel
from svc_common.health import Health
from svc_common.server import GrpcServer
from svc_common.settings import ServerSettings

SERVICE = "day0.llm.v1.LanguageService"

Generate = Callable[[llm_pb2.GenerateRequest, grpc.aio.ServicerContext], Any]


class Scripted(llm_pb2_grpc.LanguageServiceServicer):
    """A language service whose Generate is the test's own; GetLoad answers with the number of open streams."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def Generate(self, request: llm_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> Any:
        return self._generate(request, context)

    async def GetLoad(
        self, request: llm_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> llm_pb2.GetLoadResponse:
        return llm_pb2.GetLoadResponse(open_streams=7)


@dataclass
class Served:
    server: GrpcServer
    health: Health
    target: str
    stub: llm_pb2_grpc.LanguageServiceStub


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """`await serve(generate, **settings)` starts a server on free ports and a client of the same limits."""
    running: list[tuple[GrpcServer, grpc.aio.Channel]] = []

    async def start(generate: Generate, **fields: Any) -> Served:
        fields = {"grpc_port": 0, "health_port": 0, "drain_seconds": 0.1} | fields
        settings = ServerSettings(**fields)
        health = Health()
        server = GrpcServer(settings, health, name="test")
        server.add(llm_pb2_grpc.add_LanguageServiceServicer_to_server, Scripted(generate), SERVICE)
        await server.start()
        target = f"127.0.0.1:{server.grpc_port}"
        channel = open_channel(
            target, max_message_bytes=settings.max_message_bytes, keepalive_seconds=settings.keepalive_seconds
        )
        running.append((server, channel))
        return Served(server, health, target, llm_pb2_grpc.LanguageServiceStub(channel))

    yield start
    for server, channel in running:
        await channel.close()
        await server.drain()


@pytest.fixture
def text() -> Callable[[str], llm_pb2.GenerateResponse]:
    """`text("a")` is one event of an answer."""
    return lambda piece: llm_pb2.GenerateResponse(delta=common_pb2.Delta(text=piece))


@pytest.fixture
def read_all() -> Callable[..., Awaitable[str]]:
    """`await read_all(call)` is the whole text of a stream; a call that hangs fails the test."""

    async def read(call: Any) -> str:
        async with asyncio.timeout(20):
            return "".join([event.delta.text async for event in call])

    return read
