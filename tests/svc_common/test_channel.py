"""What a shipped client carries along: keepalive, deadline, cancellation, request id."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.channel import open_channel
from svc_common.deadline import Deadline, current_deadline, remaining_seconds
from svc_common.errors import DeadlineExceeded
from svc_common.logs import current_request_id

REQUEST = llm_pb2.GenerateRequest()


Forward = Callable[[bytes], bytes]
Proxy = Callable[[int, Forward, Forward], Awaitable[int]]


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """`await proxy(port, up, down)` is the port of a proxy whose two functions see, and may drop, what passes."""
    servers: list[asyncio.Server] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forward: Forward) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65536):
                writer.write(forward(data))
        writer.close()

    async def start(port: int, up: Forward, down: Forward) -> int:
        async def route(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, far_writer, up), copy(far_reader, writer, down))

        server = await asyncio.start_server(route, "127.0.0.1", 0)
        servers.append(server)
        own_port: int = server.sockets[0].getsockname()[1]
        return own_port

    yield start
    for server in servers:
        server.close()


async def test_both_ends_go_on_pinging_through_a_long_silence(
    serve: Any, text: Any, read_all: Any, proxy: Proxy
) -> None:
    """By gRPC's own defaults an end pings twice, then not for a minute, and a server answers a few pings within five
    minutes with too_many_pings."""
    pings, pinged = {"up": 0, "down": 0}, asyncio.Event()

    def count(side: str) -> Forward:
        def forward(data: bytes) -> bytes:
            # The header of a PING frame that is no answer.
            pings[side] += data.count(b"\x00\x00\x08\x06\x00")
            if min(pings.values()) >= 6:
                pinged.set()
            return data

        return forward

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        await pinged.wait()
        yield text("after the prefill")

    served = await serve(generate, keepalive_seconds=0.1)
    port = await proxy(served.server.grpc_port, count("up"), count("down"))
    async with open_channel(f"127.0.0.1:{port}", keepalive_seconds=0.1) as channel:
        assert await read_all(llm_pb2_grpc.LanguageServiceStub(channel).Generate(REQUEST)) == "after the prefill"


async def test_client_notices_a_server_that_vanished(read_all: Any) -> None:
    """A peer that accepts bytes and never answers, as behind a dropped route, ends the call by keepalive."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An HTTP/2 SETTINGS frame and its acknowledgement make the connection ready; then silence.
        writer.write(bytes.fromhex("000000040000000000000000040100000000"))
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()

    mute = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = mute.sockets[0].getsockname()[1]
    async with open_channel(f"127.0.0.1:{port}", keepalive_seconds=0.2) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(llm_pb2_grpc.LanguageServiceStub(channel).Generate(REQUEST))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    mute.close()


async def test_server_notices_a_client_that_vanished(serve: Any, text: Any, proxy: Proxy) -> None:
    ended, frozen = asyncio.Event(), asyncio.Event()

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield text("a")
            await asyncio.Event().wait()
        finally:
            ended.set()

    served = await serve(generate, keepalive_seconds=0.2)

    def forward(data: bytes) -> bytes:
        return b"" if frozen.is_set() else data

    port = await proxy(served.server.grpc_port, forward, forward)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await llm_pb2_grpc.LanguageServiceStub(channel).Generate(REQUEST).read()
        frozen.set()
        await asyncio.wait_for(ended.wait(), 10)


async def test_a_proxy_in_the_environment_is_not_used(
    serve: Any, text: Any, read_all: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("direct")

    served = await serve(generate)
    assert await read_all(served.stub.Generate(REQUEST)) == "direct"


async def test_deadline_and_request_id_travel_down(
    serve: Any, text: Any, read_all: Any, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[str, Any] = {}

    async def lower(request: Any, context: Any) -> AsyncIterator[Any]:
        seen["left"] = remaining_seconds(context)
        seen["caller"] = dict(context.invocation_metadata())["x-request-id"]
        yield text("low")

    below = await serve(lower)

    async def upper(request: Any, context: Any) -> AsyncIterator[Any]:
        seen["id"] = current_request_id.get()
        async for event in below.stub.Generate(REQUEST, timeout=600):
            yield event

    above = await serve(upper)
    with caplog.at_level(logging.INFO, logger="day0.calls"):
        assert await read_all(above.stub.Generate(REQUEST, timeout=10)) == "low"
    assert 0 < seen["left"] < 11
    assert seen["caller"] == seen["id"]
    assert seen["id"] in [getattr(record, "caller_request_id", "") for record in caplog.records]


async def test_cancellation_travels_down(serve: Any, text: Any) -> None:
    ended = asyncio.Event()

    async def lower(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield text("low")
            await asyncio.Event().wait()
        finally:
            ended.set()

    below = await serve(lower)

    async def upper(request: Any, context: Any) -> AsyncIterator[Any]:
        async for event in below.stub.Generate(REQUEST):
            yield event

    above = await serve(upper)
    call = above.stub.Generate(REQUEST)
    await call.read()
    call.cancel()
    await asyncio.wait_for(ended.wait(), 10)


async def test_no_call_is_made_after_the_deadline(serve: Any, text: Any) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")

    served = await serve(generate)
    token = current_deadline.set(Deadline.after(0))
    with pytest.raises(DeadlineExceeded):
        served.stub.Generate(REQUEST)
    current_deadline.reset(token)
    assert (await served.stub.GetLoad(llm_pb2.GetLoadRequest())).open_streams == 7
