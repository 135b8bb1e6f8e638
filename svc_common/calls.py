"""Follows every running call: its id, deadline and log line, and how a draining server ends it; knows no service."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from svc_common.deadline import Deadline, current_deadline, remaining_seconds
from svc_common.errors import (
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    to_service_error,
)
from svc_common.handlers import wrap_handler
from svc_common.logs import REQUEST_ID_KEY, current_request_id, get_logger

_log = get_logger("day0.calls")

_NOT_ID = re.compile(r"[^A-Za-z0-9_.:-]")


class _Call:
    """One running call. `end` stops it with a status of our choice; gRPC's own cancel stays a cancel."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.ended_by: ServiceError | None = None

    def end(self, error: ServiceError) -> None:
        if self.ended_by is None:
            self.ended_by = error
            self._task.cancel()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Sits inside ErrorInterceptor.

    Gives each call an id of ours (in its trailing metadata too), refuses new calls while draining or above
    `max_running`, ends a call itself when its deadline passes or an answer is above `max_message_bytes`, and writes one
    log line per call. Methods under `exempt_prefixes` are left alone.
    """

    def __init__(self, max_running: int, max_message_bytes: int, exempt_prefixes: tuple[str, ...] = ()) -> None:
        self._max_running = max_running
        self._max_message_bytes = max_message_bytes
        self._exempt_prefixes = exempt_prefixes
        self._running: set[_Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def running(self) -> int:
        """Calls being served."""
        return len(self._running)

    def refuse_new(self) -> None:
        """From now on new calls get UNAVAILABLE, reason DRAINING."""
        self._draining = True

    async def wait_idle(self, timeout_seconds: float | None) -> bool:
        """Whether the last running call ended within the time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self, error: ServiceError) -> None:
        """Ends every running call with `error`."""
        for call in list(self._running):
            call.end(error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._exempt_prefixes):
            return handler
        metadata = handler_call_details.invocation_metadata
        streaming = handler.response_streaming

        async def follow(
            request: object, context: grpc.aio.ServicerContext[Any, Any], run: Callable[[], Awaitable[Any]]
        ) -> Any:
            return await self._follow(method, streaming, metadata, context, run)

        return wrap_handler(handler, follow, self._check_answer)

    def _check_answer(self, message: Any) -> None:
        # gRPC would end the stream too, but as a failed batch that looks like a bug of ours.
        size = message.ByteSize()
        if size > self._max_message_bytes:
            raise ResourceExhausted(
                f"the answer is a message of {size} bytes, max_message_bytes is {self._max_message_bytes}",
                field="max_message_bytes",
                limit=self._max_message_bytes,
                value=size,
            )

    async def _follow(
        self,
        method: str,
        streaming: bool,
        metadata: Any,
        context: grpc.aio.ServicerContext[Any, Any],
        run: Callable[[], Awaitable[Any]],
    ) -> Any:
        request_id = uuid.uuid4().hex
        current_request_id.set(request_id)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        started = time.monotonic()
        extra: dict[str, object] = {"method": method}
        caller = _caller_request_id(metadata)
        if caller:
            extra["caller_request_id"] = caller
        status = "UNKNOWN"
        try:
            result = await self._run(context, run)
            status = "OK"
            return result
        except asyncio.CancelledError:
            # gRPC's own deadline timer may win over ours.
            deadline = current_deadline.get()
            status = "DEADLINE_EXCEEDED" if deadline is not None and deadline.expired else "CANCELLED"
            raise
        except grpc.aio.AbortError:
            status = "ABORTED_BY_HANDLER"
            raise
        except Exception as exc:
            error = to_service_error(exc)
            status = error.status.name
            extra |= {"reason": error.reason, "error": error.message}
            raise
        finally:
            extra |= {"status": status, "duration_seconds": round(time.monotonic() - started, 6)}
            # Polls of load and model would bury the rest.
            level = logging.DEBUG if status == "OK" and not streaming else logging.INFO
            _log.log(level, "call ended", extra=extra)

    async def _run(self, context: grpc.aio.ServicerContext[Any, Any], run: Callable[[], Awaitable[Any]]) -> Any:
        if self._draining:
            raise Unavailable("the service is draining", reason="DRAINING")
        if len(self._running) >= self._max_running:
            raise ResourceExhausted(
                f"too many calls at once, max_concurrent_streams is {self._max_running}",
                field="max_concurrent_streams",
                limit=self._max_running,
                value=len(self._running) + 1,
            )
        deadline = Deadline.after(remaining_seconds(context))
        deadline.child_timeout()
        current_deadline.set(deadline)
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task)
        timer = None
        left = deadline.remaining()
        if left is not None:
            error = DeadlineExceeded(f"the deadline passed after {left:.3f} s", reason="DEADLINE")
            timer = asyncio.get_running_loop().call_later(left, call.end, error)
        self._running.add(call)
        self._idle.clear()
        try:
            answer = await run()
            if call.ended_by is None:
                return answer
        except (Exception, asyncio.CancelledError) as exc:
            if call.ended_by is None:
                if isinstance(exc, asyncio.CancelledError) and not task.cancelling():
                    # Nobody cancelled this call: something that it awaited was cancelled. Passing that on would leave
                    # the client without a status (grpc/grpc 29248).
                    raise Internal("something the call waited for was cancelled", reason="LOST") from exc
                raise
        finally:
            if timer is not None:
                timer.cancel()
            self._running.discard(call)
            if not self._running:
                self._idle.set()
        # Our end wins over whatever the behaviour made of its cancellation: an answer may be cut short.
        task.uncancel()
        raise call.ended_by


def _caller_request_id(metadata: Any) -> str:
    # The caller's own id is only a label: cut and cleaned before it enters a log.
    for key, item in metadata or ():
        if key == REQUEST_ID_KEY:
            return _NOT_ID.sub("_", str(item))[:64]
    return ""
