"""Rebuilds a gRPC method handler around one coroutine; knows nothing of what that coroutine guards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

Around = Callable[[Any, Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""`around(request, context, run)`: awaits `run()` once, or raises instead. `request` is the message, or an iterator."""


class UndecodableRequest:
    """Stands for request bytes that are not the method's message."""


def wrap_handler(
    handler: grpc.RpcMethodHandler, around: Around, check_answer: Callable[[Any], None] = lambda message: None
) -> grpc.RpcMethodHandler:
    """The same method with `around` about its behaviour; `check_answer` sees each message before it is sent.

    Response streams become coroutines that write: cancelling the call's task then always raises inside `around`, also
    while a message waits for the reader, so `around` can still choose the status. Behaviours must be asynchronous.
    """
    decode = _tolerant(handler.request_deserializer)
    encode = handler.response_serializer
    if handler.response_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def stream(request: Any, context: Any) -> None:
            await around(request, context, functools.partial(_write_all, behaviour, request, context, check_answer))

        return make(stream, decode, encode)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def unary(request: Any, context: Any) -> Any:
        return await around(request, context, functools.partial(_answer, behaviour, request, context, check_answer))

    return make(unary, decode, encode)


async def _answer(
    behaviour: Callable[[Any, Any], Any], request: Any, context: Any, check_answer: Callable[[Any], None]
) -> Any:
    message = await behaviour(request, context)
    check_answer(message)
    return message


async def _write_all(
    behaviour: Callable[[Any, Any], Any], request: Any, context: Any, check_answer: Callable[[Any], None]
) -> None:
    answer = behaviour(request, context)
    if not hasattr(answer, "__aiter__"):
        await answer
        return
    async with contextlib.aclosing(answer):
        async for message in answer:
            check_answer(message)
            await context.write(message)


def _tolerant(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if decode is None:
        return None

    def decode_or_mark(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception:
            return UndecodableRequest()

    return decode_or_mark
