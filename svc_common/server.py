"""The asyncio gRPC server of a service and its life from start to drained; knows no method it serves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from svc_common.calls import CallInterceptor
from svc_common.channel import transport_options
from svc_common.errors import ErrorInterceptor, Unavailable
from svc_common.health import Health, bind
from svc_common.logs import get_logger
from svc_common.settings import ServerSettings

_log = get_logger("day0.server")

# What a call gets, after the drain limit, to send the status that ends it.
_LAST_WORDS_SECONDS = 2.0
_MIN_PING_INTERVAL_MS = 1000


class GrpcServer:
    """One service's server.

    `health` is started and stopped with it. Every service added is NOT_SERVING until `health.set_serving` says so.
    """

    def __init__(self, settings: ServerSettings, health: Health, *, name: str) -> None:
        self.name = name
        self.health = health
        self.grpc_port = 0
        self._settings = settings
        self._parts: list[tuple[Callable[[Any, grpc.aio.Server], None], Any, str]] = []
        self._server: grpc.aio.Server | None = None
        self._calls: CallInterceptor | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._stop_now = asyncio.Event()

    @property
    def running_calls(self) -> int:
        """Calls being served."""
        return 0 if self._calls is None else self._calls.running

    @property
    def draining(self) -> bool:
        """Whether the server has begun to end."""
        return self._drain_task is not None

    def add(
        self, add_servicer: Callable[[Any, grpc.aio.Server], None], servicer: object, descriptor_full_name: str
    ) -> None:
        """Adds a servicer before start, by the generated `add_..._to_server` and its full proto name."""
        assert self._server is None, "servicers are added before start"
        self._parts.append((add_servicer, servicer, descriptor_full_name))
        self.health.set_serving(descriptor_full_name, False)

    async def start(self) -> None:
        """Binds and serves; OSError names the port setting that is taken."""
        assert self._server is None, "a server is started once"
        settings = self._settings
        self._calls = CallInterceptor(
            settings.max_concurrent_streams, settings.max_message_bytes, (f"/{reflection.SERVICE_NAME}/",)
        )
        keepalive_ms = round(settings.keepalive_seconds * 1000)
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), self._calls],
            options=[
                *transport_options(settings.max_message_bytes, settings.keepalive_seconds),
                # Clients ping at their own rate, which gRPC by default takes for abuse below five minutes.
                (
                    "grpc.http2.min_ping_interval_without_data_ms",
                    max(1, min(_MIN_PING_INTERVAL_MS, keepalive_ms // 2)),
                ),
                ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
                # With it a second process would bind the same port and take half of the calls.
                ("grpc.so_reuseport", 0),
            ],
        )
        for add_servicer, servicer, _ in self._parts:
            add_servicer(servicer, server)
        names = [full_name for _, _, full_name in self._parts]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        try:
            self.grpc_port = bind(server, settings.host, settings.grpc_port, "grpc_port")
            self.health.start()
        except OSError:
            await server.stop(None)
            raise
        await server.start()
        self._server = server
        _log.info(
            "%s listens",
            self.name,
            extra={"host": settings.host, "grpc_port": self.grpc_port, "health_port": self.health.port},
        )

    async def drain(self) -> None:
        """Ends the server: readiness falls, running calls finish up to `drain_seconds`, new ones get UNAVAILABLE.

        May be called again; every caller waits for the same end.
        """
        if self._drain_task is None:
            self._drain_task = asyncio.create_task(self._drain())
        await asyncio.shield(self._drain_task)

    async def _drain(self) -> None:
        self.health.start_draining()
        if self._server is None or self._calls is None:
            self.health.stop()
            return
        self._calls.refuse_new()
        _log.info(
            "draining", extra={"running_calls": self._calls.running, "limit_seconds": self._settings.drain_seconds}
        )
        if not await self._wait_idle_or_stop_now():
            _log.warning("drain limit reached", extra={"running_calls": self._calls.running})
            self._calls.end_all(
                Unavailable(
                    "the service stopped before the call ended",
                    field="drain_seconds",
                    limit=self._settings.drain_seconds,
                    reason="DRAINING",
                )
            )
            await self._calls.wait_idle(_LAST_WORDS_SECONDS)
        await self._server.stop(grace=_LAST_WORDS_SECONDS)
        await asyncio.to_thread(self.health.stop)
        _log.info("stopped")

    async def _wait_idle_or_stop_now(self) -> bool:
        assert self._calls is not None
        idle = asyncio.create_task(self._calls.wait_idle(self._settings.drain_seconds))
        stop_now = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait((idle, stop_now), return_when=asyncio.FIRST_COMPLETED)
            return idle.done() and idle.result()
        finally:
            idle.cancel()
            stop_now.cancel()

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        assert self._server is not None, "wait comes after start"
        await self._server.wait_for_termination()
        if self._drain_task is not None:
            await asyncio.shield(self._drain_task)

    async def run_until_signal(self, load: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains; a second signal cuts the drain short.

        The handlers are set before anything else, so it also ends as process 1, where the kernel has no default for
        them. Starts the server when it is not yet started. `load` runs meanwhile (weights, first forward, and on as
        long as it likes, for example until the engine ends); a signal
        cancels it (blocking work belongs into `run_in_daemon_thread`), and its failure drains the server and is raised,
        so that the process exits non-zero.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def on_signal() -> None:
            if ended.is_set():
                self._stop_now.set()
            ended.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        loading: asyncio.Future[None] | None = None
        signalled = asyncio.create_task(ended.wait())
        try:
            if self._server is None:
                await self.start()
            if load is not None:
                loading = asyncio.ensure_future(load())
                await asyncio.wait((loading, signalled), return_when=asyncio.FIRST_COMPLETED)
                if not loading.done():
                    loading.cancel()
                    return
                loading.result()
            await signalled
        finally:
            signalled.cancel()
            try:
                await self.drain()
            finally:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)
