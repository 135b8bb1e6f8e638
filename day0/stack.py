"""Runs the planned services together: all ready or none, all ended on exit; knows no terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from day0.client import RouterClient
from day0.plan import ServicePlan
from day0.service_process import ServiceFailed, ServiceProcess
from day0.startup_watch import watch_startup
from protos.common.v1 import common_pb2
from svc_common.errors import ServiceError

# More than the services' own drain limit of 30 seconds.
STOP_PATIENCE_SECONDS = 40.0
_ROUTE_POLL_SECONDS = 0.1


class Stack:
    """The service processes of one machine, as an async context manager.

    `on_state(name, state)` hears about each service: starting, ready. `on_progress(name, progress)` hears in between,
    a few times a second, what a service that reads weights says of its start.
    """

    def __init__(self, plans: Sequence[ServicePlan], log_folder: Path, environ: Mapping[str, str]) -> None:
        self.processes = [ServiceProcess(plan, log_folder) for plan in plans]
        self.on_state: Callable[[str, str], None] = lambda name, state: None
        self.on_progress: Callable[[str, common_pb2.StartupProgress], None] = lambda name, progress: None
        self._environ = environ

    @property
    def router_target(self) -> str | None:
        """Where the router answers; None where there is none."""
        return next((process.plan.target for process in self.processes if process.plan.name == "router"), None)

    async def __aenter__(self) -> Stack:
        try:
            for process in self.processes:
                await process.start(self._environ)
                self.on_state(process.plan.name, "starting")
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def ready(self) -> None:
        """Return when every service is ready and the router, if there is one, lists a model.

        Raises ServiceFailed as soon as one of them ends.
        """
        steps = [asyncio.ensure_future(self._ready_one(process)) for process in self.processes]
        try:
            # The first failure ends the wait for the rest.
            await asyncio.gather(*steps)
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)
        target = self.router_target
        if target is not None and any(process.plan.name == "llm" for process in self.processes):
            await self._until_one_fails(self._routed(target))

    async def _ready_one(self, process: ServiceProcess) -> None:
        name = process.plan.name
        watching = asyncio.ensure_future(watch_startup(process.plan, lambda told: self.on_progress(name, told)))
        try:
            await process.ready()
        finally:
            watching.cancel()
            (outcome,) = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome
        self.on_state(name, "ready")

    @staticmethod
    async def _routed(target: str) -> None:
        async with RouterClient(target) as client:
            while not await client.list_models(timeout_seconds=10):
                await asyncio.sleep(_ROUTE_POLL_SECONDS)

    async def _until_one_fails(self, work: Coroutine[None, None, None]) -> None:
        task, failing = asyncio.ensure_future(work), asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait((task, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
            try:
                task.result()
            except ServiceError as error:
                raise ServiceFailed(f"the router does not answer: {error}") from None
        finally:
            task.cancel()
            failing.cancel()
            await asyncio.gather(task, failing, return_exceptions=True)

    async def failed(self) -> ServiceFailed:
        """Wait until a service ends by itself; the error that tells how."""
        waits = {asyncio.ensure_future(process.ended()): process for process in self.processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()].failure()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def hurry(self) -> None:
        """Cut every drain short."""
        for process in self.processes:
            process.terminate()

    async def _stop(self) -> None:
        # From the door inwards, so that running answers can finish: router, language, vision.
        for process in reversed(self.processes):
            await process.stop(STOP_PATIENCE_SECONDS)
