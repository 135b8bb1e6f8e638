"""All language services behind the configured targets, and the models they serve; knows no request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from protos.common.v1 import common_pb2
from router_svc.replica import Replica
from router_svc.settings import RouterSettings
from svc_common.addresses import AddressWatch
from svc_common.errors import InvalidArgument, NotFound, Unavailable
from svc_common.logs import get_logger
from svc_common.metrics import RouterMetrics
from svc_common.targets import Target

_log = get_logger(__name__)


class ReplicaSet:
    """All replicas of the configured targets, kept current while it runs."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        targets = [Target.parse(text) for text in settings.llm_targets]
        self._addresses = AddressWatch(targets, settings.cluster_access(), settings.dns_refresh_seconds, self._align)
        self._replicas: dict[str, Replica] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen_models: set[str] = set()

    async def start(self) -> None:
        """Resolves the targets once, then keeps following and probing; waits for no replica."""
        await self._addresses.start()

    async def stop(self) -> None:
        """Ends every probe and closes every connection; calls still running are cancelled."""
        await self._addresses.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        replicas = list(self._replicas.values())
        self._replicas.clear()
        await asyncio.gather(*(replica.close(None) for replica in replicas))

    def all(self) -> Sequence[Replica]:
        """Every replica now listed, ready or not."""
        return list(self._replicas.values())

    def ready(self, model: str) -> list[Replica]:
        """Ready replicas that serve `model`."""
        return [replica for replica in self._replicas.values() if replica.ready and _model_of(replica) == model]

    def models(self) -> dict[str, common_pb2.ModelInfo]:
        """Models with at least one ready replica, by name in alphabetical order."""
        infos = {r.info.model: r.info for r in self._replicas.values() if r.ready and r.info is not None}
        return dict(sorted(infos.items()))

    def resolve_model(self, model: str) -> str:
        """Name of the model that `model` means and that has a ready replica; the empty name means the only one.

        Raises Unavailable while no replica can answer, NotFound for an unknown name, InvalidArgument for the empty
        name where there are several models.
        """
        ready = list(self.models())
        if model in ready:
            return model
        known = sorted({name for replica in self._replicas.values() if (name := _model_of(replica)) is not None})
        if not known or model in known or (not model and not ready):
            reasons = "; ".join(f"{r.name}: {r.reason}" for r in self._replicas.values() if not r.ready)
            message = f"no replica is ready{f' for model {model!r}' if model else ''} ({reasons or 'none is listed'})"
            raise Unavailable(message, field="model", value=model, reason="NO_READY_REPLICA")
        if model:
            message = f"model {model!r} is not served here; served: {', '.join(known)}"
            raise NotFound(message, field="model", value=model, reason="UNKNOWN_MODEL")
        if len(ready) > 1:
            message = f"model is empty, and several are served: {', '.join(ready)}"
            raise InvalidArgument(message, field="model", value=model, reason="MODEL_MISSING")
        return ready[0]

    def _align(self, listed: frozenset[str]) -> None:
        """Brings the replicas in line with the addresses behind the targets."""
        for name in listed - self._replicas.keys():
            self._replicas[name] = Replica(name, self._settings, self._publish)
        for name in self._replicas.keys() - listed:
            # Streams that run there may end in their own time: every one has a deadline.
            self._keep(self._replicas.pop(name).close(self._settings.max_deadline_seconds))

    def _publish(self) -> None:
        """Sets the gauge of ready replicas."""
        # A model keeps its series at 0 when its last replica goes, so that an alert can see it.
        counts = Counter(replica.info.model for replica in self._replicas.values() if replica.ready and replica.info)
        self._seen_models |= counts.keys()
        for model in self._seen_models:
            self._metrics.ready_replicas.labels(model=model).set(counts[model])

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _model_of(replica: Replica) -> str | None:
    return None if replica.info is None else replica.info.model
