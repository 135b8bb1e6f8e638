"""The channel every day0 client opens: limits, keepalive, deadline and request id; knows no service."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from svc_common.deadline import current_deadline
from svc_common.logs import REQUEST_ID_KEY, current_request_id
from svc_common.settings import DEFAULT_MAX_MESSAGE_BYTES


def transport_options(max_message_bytes: int, keepalive_seconds: float) -> list[tuple[str, int]]:
    """gRPC arguments that both ends share."""
    keepalive_ms = max(1, round(keepalive_seconds * 1000))
    # How long a ping may stay unanswered.
    answer_ms = max(1000, min(20_000, keepalive_ms))
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        # A long prefill sends nothing for minutes; pings must go on all the same.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(
    target: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, keepalive_seconds: float = 30
) -> grpc.aio.Channel:
    """A plaintext channel to `target` (`host:port` or any gRPC name).

    Calls made while a request is being served carry its deadline (unless the caller gives a shorter timeout) and its
    request id. A message above `max_message_bytes` ends in RESOURCE_EXHAUSTED in either direction.
    """
    options = [
        *transport_options(max_message_bytes, keepalive_seconds),
        # A channel of its own connection: channels to one replica never share, nor outlive each other's limits.
        ("grpc.use_local_subchannel_pool", 1),
        # Services reach each other directly; gRPC would take a proxy from the environment.
        ("grpc.enable_http_proxy", 0),
        # By default a replica that was away for long is not tried again for two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]
    return _Channel(grpc.aio.insecure_channel(target, options=options))


class _MultiCallable:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, request: Any = None, *, timeout: float | None = None, metadata: Any = None, **rest: Any) -> Any:
        deadline = current_deadline.get()
        if deadline is not None:
            timeout = deadline.child_timeout(timeout)
        pairs = list(metadata or ())
        request_id = current_request_id.get()
        if request_id and all(key != REQUEST_ID_KEY for key, _ in pairs):
            pairs.append((REQUEST_ID_KEY, request_id))
        return self._inner(request, timeout=timeout, metadata=pairs, **rest)


class _Channel(grpc.aio.Channel):
    # A wrapper and no client interceptor: the caller gets gRPC's own call object, whose cancel() acts at once.

    def __init__(self, inner: grpc.aio.Channel) -> None:
        self._inner = inner

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.unary_unary, args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.unary_stream, args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.stream_unary, args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.stream_stream, args, kwargs)

    @staticmethod
    def _wrap(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _MultiCallable:
        return _MultiCallable(make(*args, **kwargs))
