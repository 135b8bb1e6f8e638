"""The three services as separate processes on loopback, and what each says it holds."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from day0.client import Answer, RouterClient
from day0.plan import ServeOptions, make_plans
from day0.service_process import ServiceProcess
from day0.stack import Stack
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from protos.router.v1 import router_pb2
from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.channel import open_channel
from tests.llm_svc.conftest import upstream  # noqa: F401 (a fixture of these tests too)
from tests.loopback import LoopThread

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
PATIENCE_SECONDS = 60


class Services:
    """A running stack, in an event loop of its own thread; `run` executes a coroutine there."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        options = ServeOptions(str(checkpoint), port=0, settings=("llm.threads=1", "vision.encode_threads=1"))
        self._folder = folder
        self._thread = LoopThread()
        self._stack = Stack(make_plans(options), folder, ENVIRONMENT)
        self._channels: list[Any] = []
        self.start_values: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.run(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self.run(self._stop())
        self._thread.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.run(work, PATIENCE_SECONDS * 3)

    async def _start(self) -> None:
        await self._stack.__aenter__()
        try:
            await self._stack.ready()
        except BaseException:
            await self._stack.__aexit__(None, None, None)
            raise
        assert self._stack.router_target is not None
        self.client = await RouterClient(self._stack.router_target).__aenter__()
        self.llm = llm_pb2_grpc.LanguageServiceStub(self._channel("llm"))
        self.vision = vision_pb2_grpc.VisionServiceStub(self._channel("vision"))
        self.start_values = await self.held()

    async def _stop(self) -> None:
        await self.client.__aexit__(None, None, None)
        for channel in self._channels:
            await channel.close()
        await self._stack.__aexit__(None, None, None)

    def _channel(self, name: str) -> Any:
        self._channels.append(open_channel(self.process(name).plan.target))
        return self._channels[-1]

    def process(self, name: str) -> ServiceProcess:
        return next(process for process in self._stack.processes if process.plan.name == name)

    def kill(self, name: str, number: signal.Signals) -> None:
        os.kill(self.process(name).pid, number)

    async def restart_the_dead(self) -> None:
        """Starts every service that has ended again, on its old ports, and waits until the router has a model."""
        processes = self._stack.processes
        for place, process in enumerate(processes):
            if not process.runs:
                processes[place] = ServiceProcess(process.plan, self._folder)
                await processes[place].start(ENVIRONMENT)
        await self._stack.ready()

    async def ask(self, request: router_pb2.GenerateRequest, timeout_seconds: float = PATIENCE_SECONDS) -> Answer:
        """One answer through the router."""
        return await self.client.ask(request, timeout_seconds=timeout_seconds)

    async def held(self) -> dict[str, float]:
        """Everything that a request takes and must give back, over all three services."""
        llm = await self.llm.GetLoad(llm_pb2.GetLoadRequest())
        vision = await self.vision.GetLoad(vision_pb2.GetLoadRequest())
        gauges = await self.metrics("router")
        found = {f"llm.{field.name}": getattr(llm, field.name) for field in llm.DESCRIPTOR.fields}
        # What its cache keeps is meant to stay.
        kept = ("cached_images", "cached_bytes")
        found |= {f"vision.{f.name}": getattr(vision, f.name) for f in vision.DESCRIPTOR.fields if f.name not in kept}
        names = ("day0_num_requests_waiting", "day0_num_requests_running")
        return found | {f"router.{name}": gauges[name] for name in names}

    async def metrics(self, name: str) -> dict[str, float]:
        """Metrics of a service, by full name with labels."""
        port = self.process(name).plan.metrics_port

        def read() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        lines = (await asyncio.to_thread(read)).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {key: float(value) for key, value in pairs}

    async def until(self, true_of: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Asks what is held until the condition holds; TimeoutError when it never does."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true_of(held := await self.held()):
                await asyncio.sleep(0.05)
        return held

    async def until_all_is_back(self) -> None:
        """Waits until every counter has its start value; tells those that never do."""
        try:
            await self.until(lambda held: held == self.start_values)
        except TimeoutError:
            held = await self.held()
            differ = {key: (self.start_values[key], held[key]) for key in held if held[key] != self.start_values[key]}
            raise AssertionError(f"not given back (start, now): {differ}") from None

    async def until_not_serving(self, name: str) -> None:
        """Waits until a service's own readiness has fallen."""
        plan = self.process(name).plan
        async with open_channel(f"{plan.host}:{plan.health_port}") as channel, asyncio.timeout(PATIENCE_SECONDS):
            stub = health_pb2_grpc.HealthStub(channel)
            async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=plan.full_name)):
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return
        raise AssertionError(f"the {name} service's health stream ended before it said NOT_SERVING")


@pytest.fixture(scope="module")
def services(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Router, vision and language service of the tiny checkpoint, ready."""
    with Services(tiny_checkpoint, tmp_path_factory.mktemp("services")) as running:
        yield running
