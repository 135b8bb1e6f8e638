"""Every call ends: by its deadline, by a lost wait, by cancellation, by size, and never by hanging."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.calls import CallInterceptor
from svc_common.channel import open_channel
from svc_common.errors import Cancelled, ErrorInterceptor, InvalidArgument, error_from_rpc
from svc_common.handlers import wrap_handler
from svc_common.logs import current_request_id

REQUEST = llm_pb2.GenerateRequest()
MIB = 1024 * 1024


class _OnlyTheServerKnows(grpc.aio.ServerInterceptor):
    """Tells the service of a deadline that neither the client nor gRPC itself watches."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        seconds = self._seconds

        class Context:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def time_remaining(self) -> float:
                return seconds

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

        async def stream(request: Any, context: Any) -> None:
            await handler.unary_stream(request, Context(context))

        return grpc.unary_stream_rpc_method_handler(stream, handler.request_deserializer, handler.response_serializer)


async def _call_with_hidden_deadline(generate: Any, seconds: float) -> grpc.aio.AioRpcError:
    class Service(llm_pb2_grpc.LanguageServiceServicer):
        def Generate(self, request: Any, context: Any) -> Any:
            return generate(request, context)

    interceptors = [ErrorInterceptor(), _OnlyTheServerKnows(seconds), CallInterceptor(8, MIB)]
    server = grpc.aio.server(interceptors=interceptors)
    llm_pb2_grpc.add_LanguageServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(20), open_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in llm_pb2_grpc.LanguageServiceStub(channel).Generate(REQUEST):
                    pass
            return caught.value
    finally:
        await server.stop(None)


async def test_server_watches_the_deadline_itself(text: Any) -> None:
    ended: list[str] = []

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield text("a")
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    exc = await _call_with_hidden_deadline(generate, 0.1)
    assert exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error_from_rpc(exc).reason == "DEADLINE"
    assert ended == ["ended"]


@pytest.mark.parametrize("how", ["answers", "another error"])
async def test_deadline_wins_over_what_the_handler_makes_of_the_cancellation(text: Any, how: str) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if how == "another error":
                raise Cancelled("the caller gave up") from None
        yield text("cut short")

    exc = await _call_with_hidden_deadline(generate, 0.1)
    assert exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_dead_work_is_never_started(text: Any) -> None:
    started: list[str] = []

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        started.append("started")
        yield text("a")

    exc = await _call_with_hidden_deadline(generate, 0.0)
    assert exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert started == []


async def test_short_deadline_on_a_long_answer(serve: Any, text: Any, read_all: Any) -> None:
    ended = asyncio.Event()

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while request.model != "short":
                yield text("a")
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    served = await serve(generate)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(served.stub.Generate(REQUEST, timeout=0.05))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(ended.wait(), 10)
    assert await read_all(served.stub.Generate(llm_pb2.GenerateRequest(model="short"))) == ""


async def test_deadline_ends_a_stream_nobody_reads(serve: Any, text: Any) -> None:
    ended = asyncio.Event()

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            for _ in range(1000):
                yield text("a" * 100_000)
        finally:
            ended.set()

    served = await serve(generate)
    call = served.stub.Generate(REQUEST, timeout=0.2)
    await call.read()
    await asyncio.wait_for(ended.wait(), 10)
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_cancelled_wait_inside_a_handler_does_not_leave_the_client_hanging(
    serve: Any, text: Any, read_all: Any
) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")
        lost = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost

    served = await serve(generate)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(served.stub.Generate(REQUEST))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_clients_cancel_reaches_the_handler_and_frees_the_call(serve: Any, text: Any) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield text("a")
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise

    served = await serve(generate)
    call = served.stub.Generate(REQUEST)
    await call.read()
    await started.wait()
    assert served.server.running_calls == 1
    call.cancel()
    await asyncio.wait_for(ended.wait(), 10)
    # Answering takes the loop past the end of the cancelled call.
    await served.stub.GetLoad(llm_pb2.GetLoadRequest())
    assert served.server.running_calls == 0


async def test_cancel_closes_a_generator_that_waits_for_the_reader(serve: Any, text: Any) -> None:
    ended = asyncio.Event()
    running_at_the_end: list[int] = []

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield text("a" * 100_000)
        finally:
            running_at_the_end.append(served.server.running_calls)
            ended.set()

    served = await serve(generate)
    call = served.stub.Generate(REQUEST)
    await call.read()
    call.cancel()
    await asyncio.wait_for(ended.wait(), 10)
    # What the handler holds is given back before the call counts as over, not whenever the collector runs.
    assert running_at_the_end == [1]


async def test_message_above_the_limit_names_limit_and_size(serve: Any, text: Any, read_all: Any) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a" * (int(request.model) if request.model else 3))

    served = await serve(generate, max_message_bytes=4 * MIB)
    upload = llm_pb2.GenerateRequest(
        completion=common_pb2.Completion(parts=[common_pb2.Part(image=common_pb2.Image(data=bytes(5_000_000)))])
    )

    async def refused(stub: llm_pb2_grpc.LanguageServiceStub, request: llm_pb2.GenerateRequest) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(stub.Generate(request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await read_all(stub.Generate(llm_pb2.GenerateRequest())) == "aaa"
        return caught.value.details()

    size = str(upload.ByteSize())
    async with open_channel(served.target, max_message_bytes=64 * MIB) as wide:
        by_server = await refused(llm_pb2_grpc.LanguageServiceStub(wide), upload)
        assert size in by_server and str(4 * MIB) in by_server
        answer = await refused(llm_pb2_grpc.LanguageServiceStub(wide), llm_pb2.GenerateRequest(model="5000000"))
        assert "50000" in answer and str(4 * MIB) in answer and "max_message_bytes" in answer
    roomy = await serve(generate)
    async with open_channel(roomy.target, max_message_bytes=4 * MIB) as channel:
        by_client = await refused(llm_pb2_grpc.LanguageServiceStub(channel), upload)
        assert size in by_client and str(4 * MIB) in by_client
    async with open_channel(served.target, max_message_bytes=MIB) as narrow:
        received = await refused(llm_pb2_grpc.LanguageServiceStub(narrow), llm_pb2.GenerateRequest(model="2000000"))
        assert "20000" in received and str(MIB) in received


async def test_default_limits_carry_more_than_four_mib_both_ways(serve: Any, text: Any, read_all: Any) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a" * len(request.completion.parts[0].image.data))

    served = await serve(generate)
    upload = llm_pb2.GenerateRequest(
        completion=common_pb2.Completion(parts=[common_pb2.Part(image=common_pb2.Image(data=bytes(5_000_000)))])
    )
    async with open_channel(served.target) as channel:
        answer = await read_all(llm_pb2_grpc.LanguageServiceStub(channel).Generate(upload))
    assert len(answer) == 5_000_000


async def test_calls_above_the_limit_are_refused_by_name(serve: Any, text: Any) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")
        await asyncio.Event().wait()

    served = await serve(generate, max_concurrent_streams=1)
    first = served.stub.Generate(REQUEST)
    await first.read()
    async with open_channel(served.target) as other:
        stub = llm_pb2_grpc.LanguageServiceStub(other)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_concurrent_streams is 1" in caught.value.details()
    first.cancel()


async def test_each_call_has_an_id_of_ours_and_one_log_line(
    serve: Any, text: Any, read_all: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text(current_request_id.get())

    served = await serve(generate)
    with caplog.at_level(logging.INFO, logger="day0.calls"):
        call = served.stub.Generate(REQUEST, metadata=(("x-request-id", "theirs {}" + "x" * 500),))
        ours = await read_all(call)
    assert dict(await call.trailing_metadata())["x-request-id"] == ours
    (line,) = [record for record in caplog.records if record.getMessage() == "call ended"]
    assert line.method == "/day0.llm.v1.LanguageService/Generate"
    assert line.status == "OK"
    assert line.caller_request_id == ("theirs___" + "x" * 500)[:64]
    assert ours and "theirs" not in ours


async def test_polls_are_logged_for_debugging_only(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield

    served = await serve(generate)
    with caplog.at_level(logging.DEBUG, logger="day0.calls"):
        await served.stub.GetLoad(llm_pb2.GetLoadRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await served.stub.GetModelInfo(llm_pb2.GetModelInfoRequest())
    lines = [(record.levelname, record.status) for record in caplog.records if record.getMessage() == "call ended"]
    assert lines == [("DEBUG", "OK"), ("INFO", "UNIMPLEMENTED")]


async def test_log_line_of_a_refused_call_says_why(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        raise InvalidArgument("too many", field="n", limit=4, value=9, reason="TOO_MANY")
        yield

    served = await serve(generate)
    with caplog.at_level(logging.INFO, logger="day0.calls"), pytest.raises(grpc.aio.AioRpcError):
        await served.stub.Generate(REQUEST).read()
    (line,) = [record for record in caplog.records if record.getMessage() == "call ended"]
    assert (line.status, line.reason, line.error) == (
        "INVALID_ARGUMENT",
        "TOO_MANY",
        "n: too many (limit 4, value 9)",
    )


async def test_behaviour_is_wrapped_for_every_kind_of_method() -> None:
    seen: list[Any] = []

    async def around(request: Any, context: Any, run: Any) -> Any:
        seen.append(request)
        return await run()

    class Writer:
        def __init__(self) -> None:
            self.written: list[Any] = []

        async def write(self, message: Any) -> None:
            self.written.append(message)

    async def total(requests: AsyncIterator[int], context: Any) -> int:
        return sum([number async for number in requests])

    async def echo(requests: AsyncIterator[int], context: Any) -> AsyncIterator[int]:
        async for number in requests:
            yield number

    async def numbers() -> AsyncIterator[int]:
        for number in (1, 2):
            yield number

    handler = wrap_handler(grpc.stream_unary_rpc_method_handler(total), around)
    assert await handler.stream_unary(numbers(), None) == 3
    writer = Writer()
    handler = wrap_handler(wrap_handler(grpc.stream_stream_rpc_method_handler(echo), around), around)
    await handler.stream_stream(numbers(), writer)
    assert writer.written == [1, 2]
    assert len(seen) == 3
