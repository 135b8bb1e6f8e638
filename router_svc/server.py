"""The public methods: a request comes in, one replica's stream goes back; knows neither pictures nor tokens.

Nothing is queued here. A reader that stops reading stops our writes, which stops our reads from the replica: flow
control reaches through.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from protos.router.v1 import router_pb2, router_pb2_grpc
from router_svc.admission import Admission
from router_svc.affinity import affinity_key
from router_svc.choice import choose
from router_svc.fetch import Fetcher
from router_svc.images import INLINE_BYTES, ImageLimits, resolve_images
from router_svc.replica import Replica
from router_svc.replicas import ReplicaSet
from router_svc.settings import RouterSettings
from svc_common.deadline import Deadline, current_deadline, remaining_seconds
from svc_common.errors import Unavailable, error_from_rpc, to_service_error
from svc_common.logs import current_request_id, get_logger
from svc_common.metrics import RouterMetrics

_log = get_logger(__name__)

ServicerContext: TypeAlias = grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse]


@dataclass(slots=True)
class _Stream:
    """One answer on its way to the client: what it has seen so far, which decides whether a retry is possible."""

    context: ServicerContext
    metrics: RouterMetrics
    arrival: float = field(default_factory=time.monotonic)
    accepted: bool = False
    last_delta: float | None = None
    begun: bool = False
    finished_reason: str = ""

    async def send(self, event: llm_pb2.GenerateResponse) -> None:
        """Passes one event on. The acceptance is the router's own and is sent once, whatever is retried."""
        kind = event.WhichOneof("event")
        response = router_pb2.GenerateResponse()
        if kind == "accepted":
            _log.info("accepted by the replica", extra={"replica_request_id": event.accepted.request_id})
            if self.accepted:
                return
            self.accepted = True
            response.accepted.request_id = current_request_id.get()
        elif kind == "delta":
            self._observe_delta()
            response.delta.CopyFrom(event.delta)
        elif kind == "finished":
            self.finished_reason = common_pb2.FinishReason.Name(event.finished.reason)
            response.finished.CopyFrom(event.finished)
        elif kind == "usage":
            response.usage.CopyFrom(event.usage)
        else:
            # A newer language service may say more than we know.
            return
        self.begun = self.begun or kind != "accepted"
        await self.context.write(response)

    def _observe_delta(self) -> None:
        now = time.monotonic()
        if self.last_delta is None:
            self.metrics.time_to_first_token_seconds.observe(now - self.arrival)
        else:
            self.metrics.inter_token_latency_seconds.observe(now - self.last_delta)
        self.last_delta = now


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """`day0.router.v1.RouterService`."""

    def __init__(
        self, settings: RouterSettings, replicas: ReplicaSet, fetcher: Fetcher, metrics: RouterMetrics
    ) -> None:
        self._settings = settings
        self._replicas = replicas
        self._fetcher = fetcher
        self._metrics = metrics
        self._admission = Admission(settings)
        self._image_limits = ImageLimits(settings.max_image_bytes, settings.max_total_image_bytes)

    async def Generate(self, request: router_pb2.GenerateRequest, context: ServicerContext) -> None:
        """Streams one answer; a failure is a status, counted by its name."""
        stream = _Stream(context, self._metrics)
        deadline: Deadline | None = None
        try:
            with self._admission.admitted(request.ByteSize()):
                deadline = Deadline.after(self._admission.deadline_seconds(remaining_seconds(context)))
                current_deadline.set(deadline)
                async with deadline.watch():
                    await self._serve(request, stream)
        except BaseException as error:
            self._metrics.request_failure_total.labels(status=_status_name(error, deadline)).inc()
            raise
        self._metrics.e2e_request_latency_seconds.observe(time.monotonic() - stream.arrival)
        reason = stream.finished_reason.removeprefix("FINISH_REASON_").lower() or "unspecified"
        self._metrics.request_success_total.labels(finished_reason=reason).inc()

    async def GetModelInfo(
        self, request: router_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.GetModelInfoResponse:
        """What one model is and how many replicas serve it."""
        model = self._replicas.resolve_model(request.model)
        return router_pb2.GetModelInfoResponse(
            info=self._replicas.models()[model], ready_replicas=len(self._replicas.ready(model))
        )

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ListModelsResponse:
        """Models with a ready replica, by name."""
        return router_pb2.ListModelsResponse(models=self._replicas.models().values())

    async def _serve(self, request: router_pb2.GenerateRequest, stream: _Stream) -> None:
        with self._metrics.num_requests_waiting.track_inprogress():
            self._admission.check_request(request)
            model = self._replicas.resolve_model(request.model)
            # Shed before images cost anything.
            self._admission.check_load(min(replica.queued_tokens for replica in self._replicas.ready(model)))
            image_bytes = await resolve_images(request, self._image_limits, self._fetcher)
            forwarded = _forwarded(request, model)
            prefix_bytes = self._settings.affinity_prefix_bytes
            if image_bytes <= INLINE_BYTES:
                key = affinity_key(forwarded, prefix_bytes)
            else:
                key = await asyncio.to_thread(affinity_key, forwarded, prefix_bytes)
        self._metrics.request_queue_time_seconds.observe(time.monotonic() - stream.arrival)
        await self._forward(forwarded, key, stream)

    async def _forward(self, request: llm_pb2.GenerateRequest, key: bytes, stream: _Stream) -> None:
        """Tries replicas until one has begun to answer; from then on that one's end is the answer's end."""
        tried: set[str] = set()
        failure: Unavailable | None = None
        while len(tried) < self._settings.max_attempts:
            candidates = [replica for replica in self._replicas.ready(request.model) if replica.name not in tried]
            if not candidates:
                break
            if failure is not None:
                self._metrics.request_retries_total.inc()
            replica = self._choose(candidates, key)
            tried.add(replica.name)
            failure = await self._relay(replica, request, stream)
            if failure is None:
                return
            if stream.begun:
                break
        if failure is None:
            # The last ready replica was lost while the images came in.
            self._replicas.resolve_model(request.model)
            raise Unavailable("no replica is ready", reason="NO_READY_REPLICA")
        raise failure

    def _choose(self, candidates: list[Replica], key: bytes) -> Replica:
        settings = self._settings
        return choose(
            candidates,
            key,
            extra_requests=settings.affinity_extra_requests,
            extra_tokens=settings.affinity_extra_tokens,
        )

    async def _relay(self, replica: Replica, request: llm_pb2.GenerateRequest, stream: _Stream) -> Unavailable | None:
        """Passes the replica's stream on to its end; returns the failure when the replica was unavailable.

        Any other failure is raised as it came.
        """
        with replica.carrying(), self._metrics.num_requests_running.track_inprogress():
            call = replica.stub.Generate(request)
            try:
                async for event in call:
                    await stream.send(event)
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
                if not isinstance(failure, Unavailable):
                    raise failure from error
                # Only a service that was reached puts its request id into an error.
                gone = failure.request_id is None or failure.reason == "DRAINING"
                replica.suspect(failure.message, gone=gone)
                extra = {"replica": replica.name, "reason": failure.message, "begun": stream.begun}
                _log.warning("replica unavailable", extra=extra)
                return failure
            finally:
                # However this ends, the replica stops working for us at once.
                call.cancel()
        return None


def _forwarded(request: router_pb2.GenerateRequest, model: str) -> llm_pb2.GenerateRequest:
    """The request as the language service takes it; images are bytes by now."""
    forwarded = llm_pb2.GenerateRequest(model=model)
    if request.WhichOneof("input") == "chat":
        forwarded.chat.CopyFrom(request.chat)
    else:
        forwarded.completion.CopyFrom(request.completion)
    if request.HasField("sampling"):
        forwarded.sampling.CopyFrom(request.sampling)
    return forwarded


def _status_name(error: BaseException, deadline: Deadline | None) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "DEADLINE_EXCEEDED" if deadline is not None and deadline.expired else "CANCELLED"
    return to_service_error(error).status.name
