"""The faults a service may report and the one table from exceptions to gRPC status; knows no service's own rules."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.rpc import code_pb2, error_details_pb2, status_pb2

from svc_common.handlers import UndecodableRequest, wrap_handler
from svc_common.logs import REQUEST_ID_KEY, current_request_id, get_logger

_log = get_logger("day0.errors")

ERROR_DOMAIN = "day0"
DETAILS_KEY = "grpc-status-details-bin"
# gRPC refuses more than 8 KiB of trailers, and an error that is too long would reach the caller as another error. A
# message is carried up to three times (percent-encoded, in the details, in a field violation).
MAX_MESSAGE_BYTES = 768
MAX_VALUE_BYTES = 128
MAX_NAME_BYTES = 128


def _shorten(text: str, max_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded.decode("utf-8")
    return encoded[: max_bytes - 3].decode("utf-8", "ignore") + "..."


class ServiceError(Exception):
    """A fault with a gRPC status.

    `message` is completed so that it always names `field`, `limit` and `value` where they are given. `reason` is an
    UPPER_SNAKE word for programs; by default the status' own name. Long values are cut to 128 bytes.
    """

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        limit: object = None,
        value: object = None,
        reason: str | None = None,
    ) -> None:
        self.field = None if field is None else _shorten(field, MAX_NAME_BYTES)
        self.limit = limit
        self.value = value
        self.reason = self.status.name if reason is None else reason
        # Known when the error came over the wire.
        self.request_id: str | None = None
        self.message = _complete_message(message, self.field, limit, value)
        super().__init__(self.message)


def _names(message: str, item: object) -> bool:
    """Whether the message has the item as a whole word, not as a part of another."""
    return re.search(rf"(?<![\w.]){re.escape(str(item))}(?![\w]|\.\w)", message) is not None


def _complete_message(message: str, field: str | None, limit: object, value: object) -> str:
    suffix = ""
    if limit is not None and not _names(message, limit):
        suffix += f" (limit {_shorten(str(limit), MAX_VALUE_BYTES)}"
    if value is not None and not _names(message, value):
        suffix += f"{', ' if suffix else ' ('}value {_shorten(str(value), MAX_VALUE_BYTES)}"
    if suffix:
        suffix += ")"
    prefix = f"{field}: " if field is not None and not _names(message, field) else ""
    # What names field, limit and value is kept; a long text gives way.
    room = MAX_MESSAGE_BYTES - len(prefix.encode()) - len(suffix.encode())
    return prefix + _shorten(message, room) + suffix


class InvalidArgument(ServiceError):
    """The caller can fix it by changing the request."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class ResourceExhausted(ServiceError):
    """A size or queue limit was reached."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(ServiceError):
    """Loading, draining or unreachable: the same request may work elsewhere or later."""

    status = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(ServiceError):
    """The caller's own time limit passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(ServiceError):
    """The caller gave up."""

    status = grpc.StatusCode.CANCELLED


class NotFound(ServiceError):
    """A named thing does not exist here."""

    status = grpc.StatusCode.NOT_FOUND


class Unimplemented(ServiceError):
    """This service does not do that."""

    status = grpc.StatusCode.UNIMPLEMENTED


class FailedPrecondition(ServiceError):
    """The service's state rules the request out until somebody changes that state."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class Internal(ServiceError):
    """Our own bug."""

    status = grpc.StatusCode.INTERNAL


_CLASS_OF_STATUS: Mapping[grpc.StatusCode, type[ServiceError]] = {
    cls.status: cls
    for cls in (
        InvalidArgument,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        NotFound,
        Unimplemented,
        FailedPrecondition,
        Internal,
    )
}


def to_service_error(exc: BaseException) -> ServiceError:
    """The table: what the caller is told about an exception. An unknown one is INTERNAL and says nothing of itself."""
    match exc:
        case ServiceError():
            return exc
        case grpc.aio.AioRpcError():
            return error_from_rpc(exc)
        case NotImplementedError():
            return Unimplemented("the method is not implemented by this service")
        case _:
            return Internal("internal error", reason="UNEXPECTED")


def to_status(error: ServiceError, request_id: str) -> status_pb2.Status:
    """The rich form: ErrorInfo always, RequestInfo when there is an id, BadRequest when a field is at fault."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    for key, item in (("field", error.field), ("limit", error.limit), ("value", error.value)):
        if item is not None:
            info.metadata[key] = _shorten(str(item), MAX_VALUE_BYTES)
    status = status_pb2.Status(code=getattr(code_pb2, error.status.name), message=error.message)
    status.details.add().Pack(info)
    if request_id:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    if error.field is not None and error.status is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def error_from_rpc(exc: grpc.aio.AioRpcError) -> ServiceError:
    """Client side: the ServiceError behind a failed call, with field, limit, value, reason and the server's request id.

    A status without a class of its own here (UNKNOWN, ABORTED, ...) becomes Internal, its name kept in the message.
    """
    code = exc.code()
    text = exc.details() or ""
    cls = _CLASS_OF_STATUS.get(code)
    if cls is None:
        return Internal(f"{code.name}: {text}", reason=code.name)
    error = cls(text or code.name)
    packed = _details_of(exc)
    if packed is None:
        return error
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.RequestInfo()
    for detail in packed.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            error.reason = info.reason or error.reason
            error.field = info.metadata.get("field")
            error.limit = info.metadata.get("limit")
            error.value = info.metadata.get("value")
        elif detail.Is(request.DESCRIPTOR):
            detail.Unpack(request)
            error.request_id = request.request_id
    return error


def _details_of(exc: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, item in exc.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(item, bytes):
            try:
                return status_pb2.Status.FromString(item)
            except Exception as bad:
                _log.warning("a server sent status details that cannot be read", extra={"error": str(bad)})
    return None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends each failed call with the status of the table; the outermost interceptor of a server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        async def guard(
            request: object, context: grpc.aio.ServicerContext[Any, Any], run: Callable[[], Awaitable[Any]]
        ) -> Any:
            try:
                if isinstance(request, UndecodableRequest):
                    raise InvalidArgument("the request is not a valid message of this method", field="request")
                return await run()
            except grpc.aio.AbortError:
                raise
            except grpc.aio.InternalError as exc:
                # gRPC could not write: the stream is over already, by its own status or because the client left.
                _log.info("the stream ended under the call", extra={"method": method, "error": str(exc)})
                raise asyncio.CancelledError from exc
            except Exception as exc:
                await _abort(context, exc, method)

        return wrap_handler(handler, guard)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], exc: Exception, method: str) -> None:
    error = to_service_error(exc)
    request_id = current_request_id.get() or uuid.uuid4().hex
    message = error.message
    if isinstance(error, Internal) and not isinstance(exc, grpc.aio.AioRpcError):
        _log.error("%s in %s", type(exc).__name__, method, exc_info=exc, extra={"request_id": request_id})
        message = f"{message}; request id {request_id}"
    if context.done():
        raise asyncio.CancelledError from exc
    trailers = ((DETAILS_KEY, to_status(error, request_id).SerializeToString()), (REQUEST_ID_KEY, request_id))
    try:
        await context.abort(error.status, message, trailers)
    except grpc.aio.InternalError:
        # The stream ended in this very moment, most often by gRPC's own deadline timer.
        raise asyncio.CancelledError from exc
