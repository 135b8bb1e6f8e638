"""Keeps the addresses behind configured targets current: slices where the cluster allows it, DNS otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from svc_common.endpoint_slices import ClusterAccess, EndpointSlices
from svc_common.logs import get_logger
from svc_common.targets import Target, resolve

_log = get_logger(__name__)

Changed = Callable[[frozenset[str]], None]
Addresses: TypeAlias = frozenset[str] | None


class AddressWatch:
    """Tells `changed` all addresses behind `targets` after each change, in the event loop.

    A name that fails to resolve keeps its last addresses. A Kubernetes target follows EndpointSlices; while the API
    refuses, its Service's name is resolved instead, and the log says so.
    """

    def __init__(
        self, targets: Sequence[Target], access: ClusterAccess, refresh_seconds: float, changed: Changed
    ) -> None:
        self._targets = list(targets)
        self._access = access
        self._refresh_seconds = refresh_seconds
        self._changed = changed
        self._addresses: dict[Target, frozenset[str]] = {}
        # Targets whose addresses the cluster's API tells; nobody resolves them.
        self._followed: set[Target] = set()
        self._slices: list[EndpointSlices] = []
        self._soon = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resolves every name once, then keeps following; waits for no cluster."""
        loop = asyncio.get_running_loop()
        for target in self._targets:
            if target.kind == "kubernetes":
                self._followed.add(target)
                told = partial(self._told, target)
                self._slices.append(EndpointSlices(target, self._access, partial(_call_in, loop, told)))
        await self._resolve()
        for slices in self._slices:
            slices.start()
        if any(target.expands for target in self._targets):
            self._task = asyncio.create_task(self._resolve_forever(), name="addresses")

    async def stop(self) -> None:
        """Tells nothing from now on."""
        for slices in self._slices:
            slices.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _told(self, target: Target, addresses: Addresses) -> None:
        if addresses is None:
            if target in self._followed:
                _log.warning("the name is resolved instead of following slices", extra={"target": target.dns_name})
                self._followed.discard(target)
                self._soon.set()
            return
        self._followed.add(target)
        self._addresses[target] = addresses
        self._publish()

    async def _resolve_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), self._refresh_seconds)
            self._soon.clear()
            await self._resolve()

    async def _resolve(self) -> None:
        names = [target for target in self._targets if target not in self._followed]
        answers = await asyncio.gather(*(resolve(target) for target in names), return_exceptions=True)
        for target, answer in zip(names, answers, strict=True):
            if isinstance(answer, OSError):
                _log.warning("target does not resolve", extra={"target": target.host, "error": str(answer)})
            elif isinstance(answer, BaseException):
                raise answer
            elif target not in self._followed:
                self._addresses[target] = answer
        self._publish()

    def _publish(self) -> None:
        self._changed(frozenset().union(*self._addresses.values()))


def _call_in(loop: asyncio.AbstractEventLoop, told: Callable[[Addresses], None], addresses: Addresses) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(told, addresses)
