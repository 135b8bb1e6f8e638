"""The life of a server process: loading, ready, drained by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.channel import open_channel
from svc_common.errors import error_from_rpc
from svc_common.health import Health
from svc_common.server import GrpcServer
from svc_common.settings import ServerSettings

SERVICE = "day0.llm.v1.LanguageService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = llm_pb2.GenerateRequest()

# A server whose Generate says "first", waits for a line on standard input, and says "last".
PROGRAM = """
import asyncio, json, sys, time
sys.path[:] = json.loads(sys.argv[1])
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.daemon_thread import run_in_daemon_thread
from svc_common.health import Health
from svc_common.logs import configure_logging
from svc_common.server import GrpcServer
from svc_common.settings import ServerSettings

SERVICE = "day0.llm.v1.LanguageService"

class Service(llm_pb2_grpc.LanguageServiceServicer):
    def __init__(self):
        self.line = asyncio.Event()
    async def Generate(self, request, context):
        yield llm_pb2.GenerateResponse(delta=common_pb2.Delta(text="first"))
        await self.line.wait()
        yield llm_pb2.GenerateResponse(delta=common_pb2.Delta(text="last"))

async def main(load_kind, drain_seconds):
    health = Health()
    settings = ServerSettings(grpc_port=0, health_port=0, drain_seconds=drain_seconds)
    server = GrpcServer(settings, health, name="program")
    service = Service()
    server.add(llm_pb2_grpc.add_LanguageServiceServicer_to_server, service, SERVICE)
    def on_line():
        if sys.stdin.readline():
            service.line.set()
        else:
            asyncio.get_running_loop().remove_reader(sys.stdin)
    asyncio.get_running_loop().add_reader(sys.stdin, on_line)
    async def load():
        print(json.dumps({"grpc": server.grpc_port, "health": health.port}), flush=True)
        if load_kind == "fails":
            await run_in_daemon_thread(lambda: 1 // 0, name="load")
        if load_kind == "takes long":
            await run_in_daemon_thread(lambda: time.sleep(600), name="load")
        health.set_serving(SERVICE, True)
    await server.run_until_signal(load)

configure_logging("program", "json", "INFO")
asyncio.run(main(sys.argv[2], float(sys.argv[3])))
"""


@dataclass
class Program:
    process: asyncio.subprocess.Process
    stub: llm_pb2_grpc.LanguageServiceStub
    health: health_pb2_grpc.HealthStub
    pid: int

    async def check(self, service: str) -> int:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status

    async def wait_ready(self) -> Any:
        """The watch of the service, at SERVING."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        while (await watch.read()).status != SERVING:
            pass
        return watch

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 30)


@asynccontextmanager
async def _program(
    load: str = "at once", drain_seconds: float = 30, prefix: tuple[str, ...] = ()
) -> AsyncIterator[Program]:
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-c",
        PROGRAM,
        json.dumps(sys.path),
        load,
        str(drain_seconds),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, (await process.communicate())[1].decode()
        ports = json.loads(line)
        pid = process.pid
        if prefix:
            pid = psutil.Process(process.pid).children()[0].pid
        async with (
            open_channel(f"127.0.0.1:{ports['grpc']}") as channel,
            open_channel(f"127.0.0.1:{ports['health']}") as health_channel,
        ):
            yield Program(
                process,
                llm_pb2_grpc.LanguageServiceStub(channel),
                health_pb2_grpc.HealthStub(health_channel),
                pid,
            )
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_sigterm_during_a_stream() -> None:
    async with _program() as program:
        watch = await program.wait_ready()
        stream = program.stub.Generate(REQUEST)
        assert (await stream.read()).delta.text == "first"
        os.kill(program.pid, signal.SIGTERM)
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        assert await program.check("") == SERVING, "a draining process must not be restarted"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await program.stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_from_rpc(caught.value).reason == "DRAINING"
        assert program.process.stdin is not None
        program.process.stdin.write(b"go on\n")
        assert (await stream.read()).delta.text == "last"
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert await program.exit_code() == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await program.stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stream_beyond_the_drain_limit_is_told_so() -> None:
    async with _program(drain_seconds=0.3) as program:
        await program.wait_ready()
        stream = program.stub.Generate(REQUEST)
        await stream.read()
        os.kill(program.pid, signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(stream.read(), 20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        error = error_from_rpc(caught.value)
        assert (error.reason, error.field, error.limit) == ("DRAINING", "drain_seconds", "0.3")
        assert await program.exit_code() == 0


async def test_second_signal_cuts_the_drain_short() -> None:
    async with _program(drain_seconds=600) as program:
        watch = await program.wait_ready()
        stream = program.stub.Generate(REQUEST)
        await stream.read()
        os.kill(program.pid, signal.SIGINT)
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        os.kill(program.pid, signal.SIGINT)
        assert await asyncio.wait_for(stream.code(), 20) is grpc.StatusCode.UNAVAILABLE
        assert await program.exit_code() == 0


async def test_alive_but_not_ready_while_loading_and_stops_at_once() -> None:
    async with _program(load="takes long") as program:
        assert await program.check(SERVICE) == NOT_SERVING
        assert await program.check("") == SERVING
        os.kill(program.pid, signal.SIGTERM)
        assert await program.exit_code() == 0


async def test_failed_load_exits_non_zero_with_its_reason() -> None:
    async with _program(load="fails") as program:
        _, stderr = await asyncio.wait_for(program.process.communicate(), 30)
        assert program.process.returncode == 1
        assert b"ZeroDivisionError" in stderr


def _can_unshare() -> bool:
    command = shutil.which("unshare")
    if command is None:
        return False
    return subprocess.run([command, "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_unshare(), reason="making a PID namespace is not allowed here")
async def test_ends_as_process_one() -> None:
    """For process 1 the kernel has no default action: without a handler SIGTERM is ignored."""
    async with _program(prefix=("unshare", "--pid", "--fork", "--kill-child")) as program:
        await program.wait_ready()
        os.kill(program.pid, signal.SIGTERM)
        assert await program.exit_code() == 0


async def test_reflection_lists_the_service(serve: Any) -> None:
    async def generate(request: Any, context: Any) -> Any:
        yield

    served = await serve(generate)
    async with open_channel(served.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        assert SERVICE in [service.name for service in answer.list_services_response.service]
        # An open reflection stream does not hold a drain up.
        assert served.server.running_calls == 0


async def test_service_is_not_ready_until_told(serve: Any) -> None:
    async def generate(request: Any, context: Any) -> Any:
        yield

    served = await serve(generate)
    assert served.health.status(SERVICE) == NOT_SERVING
    served.health.set_serving(SERVICE, True)
    assert served.health.status(SERVICE) == SERVING


@pytest.mark.parametrize("setting", ["grpc_port", "health_port"])
async def test_taken_port_is_named(setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fields = {"grpc_port": 0, "health_port": 0} | {setting: port}
        settings = ServerSettings(**fields)
        server = GrpcServer(settings, Health(settings.host, settings.health_port), name="test")
        with pytest.raises(OSError, match=rf"{setting}: cannot listen on 127\.0\.0\.1:{port}"):
            await server.start()
        await server.drain()


async def test_two_servers_never_share_a_port(serve: Any) -> None:
    async def generate(request: Any, context: Any) -> Any:
        yield

    served = await serve(generate)
    with pytest.raises(OSError, match="grpc_port"):
        await serve(generate, grpc_port=served.server.grpc_port)


async def test_drain_may_be_called_by_many_and_before_start(serve: Any) -> None:
    async def generate(request: Any, context: Any) -> Any:
        yield

    served = await serve(generate)
    waiting = asyncio.create_task(served.server.wait())
    await asyncio.gather(served.server.drain(), served.server.drain())
    await asyncio.wait_for(waiting, 10)
    never_started = GrpcServer(ServerSettings(), Health(), name="test")
    await never_started.drain()


async def test_handlers_are_put_back(serve: Any) -> None:
    before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGTERM)
    server = GrpcServer(ServerSettings(grpc_port=0, health_port=0), Health(), name="test")

    async def fail() -> None:
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        await server.run_until_signal(fail)
    assert signal.getsignal(signal.SIGTERM) == before
