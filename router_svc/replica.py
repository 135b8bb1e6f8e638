"""One language service at one address: whether it is ready, what it serves, how busy it is; knows no request.

Readiness is judged by the service's own answers on its gRPC port: one that starts or drains answers GetLoad with
UNAVAILABLE, and GetModelInfo of one that starts has no model in it. The health service has a port of its own, which a
target does not name.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator

import grpc

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from router_svc.settings import RouterSettings
from svc_common.channel import open_channel
from svc_common.logs import get_logger

_log = get_logger(__name__)


class _NotReady(Exception):
    """The service answers and has no model yet; the message says how far it is."""


class Replica:
    """One language service at one address. `ready` follows its last probe; a broken connection ends it at once."""

    def __init__(self, name: str, settings: RouterSettings, changed: Callable[[], None]) -> None:
        self.name = name
        self.ready = False
        self.reason = "not probed yet"
        self.info: common_pb2.ModelInfo | None = None
        self.in_flight = 0
        self._settings = settings
        self._changed = changed
        self._load = llm_pb2.GetLoadResponse()
        self._in_flight_at_probe = 0
        self._failures = 0
        self._probe_now = asyncio.Event()
        self._channel = self._open()
        self.stub = llm_pb2_grpc.LanguageServiceStub(self._channel)
        self._watch = asyncio.create_task(self._watch_health(), name=f"watch {name}")

    @property
    def open_requests(self) -> int:
        """Requests waiting or running there: what it last said, corrected by what we have started or ended since."""
        reported = self._load.waiting_requests + self._load.running_sequences
        return max(self.in_flight, reported + self.in_flight - self._in_flight_at_probe)

    @property
    def queued_tokens(self) -> int:
        """Token-work waiting there when last asked."""
        return self._load.queued_tokens

    @contextlib.contextmanager
    def carrying(self) -> Iterator[None]:
        """Counts one request as in flight here."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def suspect(self, reason: str, *, gone: bool) -> None:
        """A request failed here with UNAVAILABLE: probe now, and when the service is gone take no more until then."""
        if gone:
            self._mark_down(reason)
        self._probe_now.set()

    async def close(self, grace_seconds: float | None) -> None:
        """Takes no more requests; those in flight may end within `grace_seconds`, then they are cancelled."""
        self._mark_down("no longer listed")
        self._watch.cancel()
        await asyncio.wait([self._watch])
        await self._channel.close(grace_seconds)

    async def _watch_health(self) -> None:
        settings = self._settings
        while True:
            self._probe_now.clear()
            try:
                await self._probe()
            except Exception as error:
                self._failures += 1
                await self._judge(error)
                doublings = min(self._failures - 1, 16)
                wait_seconds = min(settings.probe_backoff_max_seconds, settings.probe_backoff_seconds * 2**doublings)
                # Spread, or all routers probe a restarted service at the same moment.
                await asyncio.sleep(wait_seconds * random.uniform(0.8, 1.2))
            else:
                self._failures = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(settings.load_poll_seconds):
                        await self._probe_now.wait()

    async def _probe(self) -> None:
        timeout = self._settings.probe_timeout_seconds
        started_with = self.in_flight
        info, load = await asyncio.gather(
            self.stub.GetModelInfo(llm_pb2.GetModelInfoRequest(), timeout=timeout),
            self.stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=timeout),
        )
        if not info.info.model:
            raise _NotReady(f"GetModelInfo has no model yet, startup stage {info.startup.stage or 'not told'}")
        self.info, self._load, self._in_flight_at_probe = info.info, load, started_with
        if not self.ready:
            _log.info("replica is ready", extra={"replica": self.name, "model": self.info.model})
        self.ready, self.reason = True, ""
        self._changed()

    async def _judge(self, error: Exception) -> None:
        """What a failed probe means: a busy service may be late a few times, anything else ends readiness."""
        if isinstance(error, _NotReady):
            self._mark_down(str(error))
            return
        if not isinstance(error, grpc.aio.AioRpcError):
            # Our own fault; the watch goes on all the same, or the replica would be frozen in its last state.
            _log.error("probe failed unexpectedly", exc_info=error, extra={"replica": self.name})
            self._mark_down(f"probe failed: {type(error).__name__}")
            return
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if late and self.ready and self._failures <= self._settings.probe_timeouts_allowed:
            return
        self._mark_down(f"{error.code().name}: {error.details()}")
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await self._reconnect()

    def _mark_down(self, reason: str) -> None:
        if self.ready:
            _log.warning("replica is not ready", extra={"replica": self.name, "reason": reason})
        self.ready, self.reason = False, reason
        self._changed()

    def _open(self) -> grpc.aio.Channel:
        return open_channel(
            self.name,
            max_message_bytes=self._settings.max_message_bytes,
            keepalive_seconds=self._settings.keepalive_seconds,
        )

    async def _reconnect(self) -> None:
        """Starts over with a new connection: an old one waits up to two minutes before it tries again."""
        if self.in_flight:
            return
        old, self._channel = self._channel, self._open()
        self.stub = llm_pb2_grpc.LanguageServiceStub(self._channel)
        await old.close()
