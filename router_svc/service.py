"""Puts the router together and runs it from start to drained; knows no request."""

from __future__ import annotations

import asyncio
import ipaddress

from protos.router.v1 import router_pb2, router_pb2_grpc
from router_svc.fetch import Fetcher, FetchPolicy
from router_svc.replicas import ReplicaSet
from router_svc.server import RouterServicer
from router_svc.settings import RouterSettings
from svc_common.health import Health, StepAge
from svc_common.metrics import RouterMetrics
from svc_common.server import GrpcServer

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name

_BEAT_SECONDS = 1.0


class Router:
    """One router. Ready as soon as it listens: its readiness never asks a language service."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.metrics = RouterMetrics()
        self.health = Health(settings.host, settings.health_port)
        self.replicas = ReplicaSet(settings, self.metrics)
        self.server = GrpcServer(settings, self.health, name="router")
        self.metrics_port = 0
        self._fetcher = Fetcher(_fetch_policy(settings))
        self._beat: asyncio.Task[None] | None = None
        servicer = RouterServicer(settings, self.replicas, self._fetcher, self.metrics)
        self.server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer, SERVICE_NAME)

    async def start(self) -> None:
        """Binds every port and begins to look for replicas; OSError names the port setting that is taken."""
        self.metrics_port = self.metrics.start_http(self._settings.host, self._settings.metrics_port)
        await self.replicas.start()
        self._beat = asyncio.create_task(self._beat_forever())
        await self.server.start()
        self.health.set_serving(SERVICE_NAME, True)

    async def stop(self) -> None:
        """Drains, then closes everything."""
        await self.server.drain()
        await self._close()

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains."""
        try:
            await self.start()
            await self.server.run_until_signal()
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        await self.replicas.stop()
        await self._fetcher.close()
        if self.metrics_port:
            await asyncio.to_thread(self.metrics.stop_http)
            self.metrics_port = 0

    async def _beat_forever(self) -> None:
        """Liveness is a turning event loop."""
        age = StepAge()
        age.begin_waiting()
        self.health.set_liveness(lambda: age.alive(self._settings.liveness_seconds))
        while True:
            await asyncio.sleep(min(_BEAT_SECONDS, self._settings.liveness_seconds / 4))
            age.step()


def _fetch_policy(settings: RouterSettings) -> FetchPolicy:
    return FetchPolicy(
        hosts=settings.fetch_allowed_hosts,
        networks=tuple(ipaddress.ip_network(text) for text in settings.fetch_allowed_networks),
        max_bytes=settings.max_image_bytes,
        max_redirects=settings.fetch_max_redirects,
        timeout_seconds=settings.fetch_timeout_seconds,
        max_connections=settings.fetch_max_connections,
    )
