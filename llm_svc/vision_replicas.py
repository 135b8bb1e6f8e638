"""The vision services behind one target: which of them encodes the next image; knows no image."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from llm_svc.settings import LlmSettings
from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.addresses import AddressWatch
from svc_common.channel import open_channel
from svc_common.errors import Unavailable
from svc_common.targets import Target


@dataclass(eq=False, slots=True)
class VisionReplica:
    """One vision service at one address, and the calls that run there."""

    name: str
    channel: grpc.aio.Channel
    in_flight: int = 0
    stub: vision_pb2_grpc.VisionServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = vision_pb2_grpc.VisionServiceStub(self.channel)

    def encode(self, request: vision_pb2.EncodeRequest) -> Any:
        """Starts the call; it counts here until it ends."""
        call = self.stub.Encode(request)
        self.in_flight += 1
        call.add_done_callback(self._ended)
        return call

    def _ended(self, _: Any) -> None:
        self.in_flight -= 1


class VisionReplicas:
    """Every vision service behind `settings.vision_target`, one connection each, kept current while it runs."""

    def __init__(self, settings: LlmSettings) -> None:
        self._settings = settings
        self._replicas: dict[str, VisionReplica] = {}
        self._closing: set[asyncio.Task[None]] = set()
        target = Target.parse(settings.vision_target)
        self._addresses = AddressWatch([target], settings.cluster_access(), settings.dns_refresh_seconds, self._align)

    async def start(self) -> None:
        """Resolves the target once and follows it; waits for no service."""
        await self._addresses.start()

    async def stop(self) -> None:
        """Closes every connection; calls still running are cancelled."""
        await self._addresses.stop()
        for task in self._closing:
            task.cancel()
        if self._closing:
            await asyncio.wait(self._closing)
        await asyncio.gather(*(replica.channel.close(None) for replica in self._replicas.values()))

    def choose(self, tried: Collection[VisionReplica] = ()) -> VisionReplica:
        """The service with the fewest calls of ours, but for those in `tried`; Unavailable where none is left."""
        left = [replica for replica in self._replicas.values() if replica not in tried]
        if not left:
            message = f"no vision service is listed behind {self._settings.vision_target}"
            raise Unavailable(message, reason="VISION_UNAVAILABLE")
        chosen = min(left, key=lambda replica: replica.in_flight)
        # Behind the others: equals take turns.
        self._replicas[chosen.name] = self._replicas.pop(chosen.name)
        return chosen

    def others(self, tried: Collection[VisionReplica]) -> bool:
        """Whether a service is listed that is not among `tried`."""
        return any(replica not in tried for replica in self._replicas.values())

    def _align(self, listed: frozenset[str]) -> None:
        for name in sorted(listed - self._replicas.keys()):
            channel = open_channel(
                name,
                max_message_bytes=self._settings.max_message_bytes,
                keepalive_seconds=self._settings.keepalive_seconds,
            )
            self._replicas[name] = VisionReplica(name, channel)
        for name in self._replicas.keys() - listed:
            # An image on its way may end in its own time; a drain there is bounded.
            task = asyncio.create_task(self._replicas.pop(name).channel.close(self._settings.drain_seconds))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
