"""grpc.health.v1 on a port and threads of its own, so a busy event loop cannot fail it; knows no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.logs import get_logger

_log = get_logger("day0.health")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

LIVENESS = ""
MAX_WATCHERS = 16
# Liveness changes by the passing of time alone, so watchers look again this often.
WATCH_TICK_SECONDS = 1.0


class StepAge:
    """Age of the engine's last step while work waits; a full queue or a long queue never ages it, only a stuck step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def begin_waiting(self) -> None:
        """Work is there. Starts the clock, unless it runs: more work must not hide a stuck step."""
        if self._since is None:
            self._since = self._clock()

    def step(self) -> None:
        """A step ended and work is left."""
        self._since = self._clock()

    def idle(self) -> None:
        """No work is left."""
        self._since = None

    def age_seconds(self) -> float:
        """Seconds since the last step, or since work began to wait; 0 when idle."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def alive(self, limit_seconds: float) -> bool:
        """Whether the age is within the limit."""
        return self.age_seconds() <= limit_seconds


class Health:
    """Named services are NOT_SERVING until told otherwise; `""` is liveness and SERVING from the first second."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._requested_port = port
        self._server: grpc.Server | None = None
        self._changed = threading.Condition()
        self._serving: dict[str, bool] = {}
        self._liveness: Callable[[], bool] = lambda: True
        self._draining = False
        self._stopped = False
        self._watchers = 0
        self.port = 0

    def start(self) -> None:
        """Binds the port and serves; OSError when the port is taken."""
        assert self._server is None, "health is started once"
        server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=MAX_WATCHERS + 4, thread_name_prefix="day0-health"),
            options=[("grpc.so_reuseport", 0)],
        )
        health_pb2_grpc.add_HealthServicer_to_server(_HealthServicer(self), server)
        self.port = bind(server, self._host, self._requested_port, "health_port")
        server.start()
        self._server = server

    def stop(self) -> None:
        """Ends the watchers and closes the port. May be called twice."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._server is not None:
            self._server.stop(grace=1).wait()
            self._server = None

    def set_serving(self, full_service_name: str, serving: bool) -> None:
        """Readiness of one service, by its full proto name. Stays NOT_SERVING once draining."""
        assert full_service_name != LIVENESS, "liveness is set by set_liveness"
        with self._changed:
            self._serving[full_service_name] = serving
            self._changed.notify_all()

    def set_liveness(self, alive: Callable[[], bool]) -> None:
        """What `""` answers; called at every Check and Watch tick, from the health threads."""
        with self._changed:
            self._liveness = alive
            self._changed.notify_all()

    def start_draining(self) -> None:
        """Every named service is NOT_SERVING for good; liveness goes on, for a draining process must not be killed."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def status(self, service: str) -> int | None:
        """The HealthCheckResponse.ServingStatus of a service; None when it is not known here."""
        if service == LIVENESS:
            try:
                return SERVING if self._liveness() else NOT_SERVING
            except Exception:
                _log.exception("the liveness check itself failed")
                return NOT_SERVING
        with self._changed:
            serving = self._serving.get(service)
            if serving is None:
                return None
            return SERVING if serving and not self._draining else NOT_SERVING

    def watch(self, service: str, active: Callable[[], bool]) -> Iterator[int]:
        """Statuses of a service as they change, the present one first, while `active()`."""
        last: int | None = None
        while active() and not self._stopped:
            now = self.status(service)
            now = SERVICE_UNKNOWN if now is None else now
            if now != last:
                yield now
                last = now
                continue
            with self._changed:
                if not self._stopped:
                    self._changed.wait(WATCH_TICK_SECONDS)

    def known_services(self) -> list[str]:
        """Liveness and every named service."""
        with self._changed:
            return [LIVENESS, *sorted(self._serving)]


class _HealthServicer(health_pb2_grpc.HealthServicer):
    def __init__(self, health: Health) -> None:
        self._health = health
        self._slots = threading.BoundedSemaphore(MAX_WATCHERS)

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._health.status(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"service: unknown, got {request.service[:128]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    def List(
        self, request: health_pb2.HealthListRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthListResponse:
        response = health_pb2.HealthListResponse()
        for service in self._health.known_services():
            response.statuses[service].status = self._health.status(service) or NOT_SERVING
        return response

    def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        # A watcher holds a thread; the rest stay free for Check.
        if not self._slots.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"too many watchers, limit {MAX_WATCHERS}")
        try:
            for status in self._health.watch(request.service, context.is_active):
                yield health_pb2.HealthCheckResponse(status=status)
        finally:
            self._slots.release()


def bind(server: grpc.Server, host: str, port: int, setting: str) -> int:
    """Binds a gRPC server of either kind and returns the port; OSError names the setting when that fails."""
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    try:
        bound: int = server.add_insecure_port(f"{shown}:{port}")
    except RuntimeError as exc:
        raise OSError(f"{setting}: cannot listen on {shown}:{port}: {exc}") from None
    if bound == 0:
        raise OSError(f"{setting}: cannot listen on {shown}:{port}")
    return bound
