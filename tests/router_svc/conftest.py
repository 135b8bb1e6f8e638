"""Real servers on loopback for the router's tests: language services that do what a script says, and a router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from protos.router.v1 import router_pb2, router_pb2_grpc
from router_svc.service import Router
from router_svc.settings import RouterSettings
from svc_common.channel import open_channel
from svc_common.errors import ErrorInterceptor, ServiceError

Answer = Callable[[llm_pb2.GenerateRequest, Any], AsyncIterator[llm_pb2.GenerateResponse]]

MESSAGE_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


def accepted(request_id: str = "replica-id") -> llm_pb2.GenerateResponse:
    return llm_pb2.GenerateResponse(accepted=common_pb2.Accepted(request_id=request_id))


def delta(text: str) -> llm_pb2.GenerateResponse:
    return llm_pb2.GenerateResponse(delta=common_pb2.Delta(text=text, token_ids=[7]))


def finished() -> llm_pb2.GenerateResponse:
    return llm_pb2.GenerateResponse(finished=common_pb2.ChoiceFinished(reason=common_pb2.FINISH_REASON_STOP))


def usage() -> llm_pb2.GenerateResponse:
    return llm_pb2.GenerateResponse(usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=2))


class LlmDouble(llm_pb2_grpc.LanguageServiceServicer):
    """A language service whose answers are scripted; it can be killed and revived on its port."""

    def __init__(self, name: str, model: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.name = name
        self.host = host
        self.model = model
        self.load = llm_pb2.GetLoadResponse()
        self.unavailable: ServiceError | None = None
        self.startup_stage = "ready"
        self.stalled = False
        self.probes_while_stalled = 0
        self.answer: Answer = self.short_answer
        self.requests: list[llm_pb2.GenerateRequest] = []
        self.deadlines_seconds: list[float | None] = []
        self.open_streams = 0
        self.sent = 0
        self.cancelled = asyncio.Event()
        self.port = port
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        options = [*MESSAGE_OPTIONS, ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
        llm_pb2_grpc.add_LanguageServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"{self.host}:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def short_answer(self, request: llm_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield delta(f"from {self.name}")
        yield finished()
        yield usage()

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        self.deadlines_seconds.append(context.time_remaining())
        self.open_streams += 1
        try:
            async with contextlib.aclosing(self.answer(request, context)) as events:
                async for event in events:
                    await context.write(event)
                    self.sent += 1
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.open_streams -= 1

    async def GetModelInfo(self, request: Any, context: Any) -> llm_pb2.GetModelInfoResponse:
        if self.unavailable is not None:
            raise self.unavailable
        info = common_pb2.ModelInfo(model=self.model, architecture="Double", context_tokens=4096)
        startup = common_pb2.StartupProgress(stage=self.startup_stage)
        return llm_pb2.GetModelInfoResponse(info=info if startup.stage == "ready" else None, startup=startup)

    async def GetLoad(self, request: Any, context: Any) -> llm_pb2.GetLoadResponse:
        if self.stalled:
            self.probes_while_stalled += 1
            await asyncio.Event().wait()
        if self.unavailable is not None:
            raise self.unavailable
        return self.load


class RouterUnderTest:
    """A running router with a client of its own."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.channel = open_channel(f"127.0.0.1:{router.server.grpc_port}")
        self.stub = router_pb2_grpc.RouterServiceStub(self.channel)

    async def generate(self, request: router_pb2.GenerateRequest, **options: Any) -> list[router_pb2.GenerateResponse]:
        return [event async for event in self.stub.Generate(request, **options)]

    async def text(self, request: router_pb2.GenerateRequest, **options: Any) -> str:
        return "".join(event.delta.text for event in await self.generate(request, **options))

    async def wait_ready(self, count: int) -> None:
        """Returns once exactly `count` replicas are ready."""
        await eventually(lambda: sum(replica.ready for replica in self.router.replicas.all()) == count)

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(f"day0_{name}", labels) or 0.0


async def eventually(condition: Callable[[], bool], timeout_seconds: float = 10.0) -> None:
    """Polls until the condition holds; TimeoutError when it never does."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture
async def start_llm() -> AsyncIterator[Callable[..., Awaitable[LlmDouble]]]:
    """Starts a language service double."""
    doubles: list[LlmDouble] = []

    async def start(name: str = "a", model: str = "tiny", **address: Any) -> LlmDouble:
        double = LlmDouble(name, model, **address)
        await double.start()
        doubles.append(double)
        return double

    yield start
    for double in doubles:
        await double.stop()


@pytest.fixture
async def start_router() -> AsyncIterator[Callable[..., Awaitable[RouterUnderTest]]]:
    """Starts a router in front of doubles (or of `llm_targets`) and waits until the doubles are ready."""
    running: list[RouterUnderTest] = []

    async def start(*doubles: LlmDouble, ready: int | None = None, **settings: Any) -> RouterUnderTest:
        values: dict[str, Any] = {
            "llm_targets": tuple(double.target for double in doubles),
            "grpc_port": 0,
            "health_port": 0,
            "metrics_port": 0,
            "drain_seconds": 1,
            "load_poll_seconds": 0.05,
            "probe_backoff_seconds": 0.02,
            "probe_backoff_max_seconds": 0.1,
            "dns_refresh_seconds": 0.05,
        }
        router = Router(RouterSettings(**(values | settings)))
        await router.start()
        under_test = RouterUnderTest(router)
        running.append(under_test)
        await under_test.wait_ready(len(doubles) if ready is None else ready)
        return under_test

    yield start
    for under_test in running:
        await under_test.channel.close()
        await under_test.router.stop()


class WebHost:
    """An HTTP host on loopback that sends the raw answers it is told to, and notes what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.open_connections = 0
        self.endless = b""
        self.port = 0
        self._server: asyncio.Server | None = None

    def body(self, path: str, body: bytes, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        self.answers[path] = "\r\n".join(lines).encode() + body

    def redirect(self, path: str, location: str) -> None:
        self.body(path, b"", "302 Found", f"Location: {location}")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            host = next(line[5:].strip() for line in head.split("\r\n") if line.lower().startswith("host:"))
            self.asked.append((head.split(" ")[1], host))
            writer.write(self.answers.get(head.split(" ")[1], b""))
            while self.endless:
                writer.write(self.endless)
                await writer.drain()
                await asyncio.sleep(0.005)
            if head.split(" ")[1] not in self.answers:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_connections -= 1
            writer.close()


@pytest.fixture
async def start_web() -> AsyncIterator[Callable[[], Awaitable[WebHost]]]:
    """Starts an HTTP host on loopback."""
    hosts: list[WebHost] = []

    async def start() -> WebHost:
        host = WebHost()
        await host.start()
        hosts.append(host)
        return host

    yield start
    for host in hosts:
        await host.stop()


@pytest.fixture
def chat() -> Callable[..., router_pb2.GenerateRequest]:
    """Builds a one-turn request from texts (str), pictures (bytes) and ready parts."""

    def build(*contents: str | bytes | common_pb2.Part, **fields: Any) -> router_pb2.GenerateRequest:
        parts = []
        for content in contents or ("hi",):
            if isinstance(content, common_pb2.Part):
                parts.append(content)
            elif isinstance(content, bytes):
                parts.append(common_pb2.Part(image=common_pb2.Image(data=content)))
            else:
                parts.append(common_pb2.Part(text=content))
        message = common_pb2.Message(role=common_pb2.ROLE_USER, parts=parts)
        return router_pb2.GenerateRequest(chat=common_pb2.Chat(messages=[message]), **fields)

    return build
