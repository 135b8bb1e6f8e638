"""Exceptions become the status, the message and the details of the table."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from svc_common import errors


async def _fail(serve: Any, exc: BaseException) -> grpc.aio.AioRpcError:
    async def generate(request: Any, context: Any) -> Any:
        raise exc
        yield

    served = await serve(generate)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(served.stub.Generate(llm_pb2.GenerateRequest()).read(), 10)
    # The next request works.
    assert (await served.stub.GetLoad(llm_pb2.GetLoadRequest())).open_streams == 7
    assert served.server.running_calls == 0
    return caught.value


@pytest.mark.parametrize(
    "cls",
    [
        errors.InvalidArgument,
        errors.ResourceExhausted,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.NotFound,
        errors.Unimplemented,
        errors.FailedPrecondition,
        errors.Internal,
    ],
)
async def test_error_goes_over_the_wire_and_back(serve: Any, cls: type[errors.ServiceError]) -> None:
    sent = cls("out of range", field="sampling.temperature", limit="[0, 2]", value=3.5, reason="TOO_HOT")
    exc = await _fail(serve, sent)
    back = errors.error_from_rpc(exc)
    assert type(back) is cls
    assert exc.code() is cls.status
    assert (back.field, back.limit, back.value, back.reason) == ("sampling.temperature", "[0, 2]", "3.5", "TOO_HOT")
    assert back.request_id
    for part in ("sampling.temperature", "[0, 2]", "3.5"):
        assert part in back.message


async def test_invalid_argument_carries_a_field_violation(serve: Any) -> None:
    exc = await _fail(serve, errors.InvalidArgument("must be positive", field="max_tokens", value=-1))
    status = rpc_status.from_call(exc)
    violation = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violation) for detail in status.details)
    assert [(v.field, v.description) for v in violation.field_violations] == [
        ("max_tokens", "max_tokens: must be positive (value -1)")
    ]


async def test_unknown_exception_leaks_nothing_and_is_logged_with_its_request_id(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        exc = await _fail(serve, KeyError("/secret/path"))
    assert exc.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in exc.details()
    assert b"secret" not in repr(exc.trailing_metadata()).encode()
    request_id = errors.error_from_rpc(exc).request_id
    assert request_id and request_id in exc.details()
    records = [record for record in caplog.records if getattr(record, "request_id", "") == request_id]
    assert records and records[0].exc_info is not None
    assert "/secret/path" in repr(records[0].exc_info[1])


async def test_status_of_a_failed_downstream_call_passes_through(serve: Any) -> None:
    downstream = await _fail(serve, errors.InvalidArgument("too small", field="image", limit=4, value=1))
    exc = await _fail(serve, downstream)
    assert exc.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert errors.error_from_rpc(exc).field == "image"


async def test_longest_error_still_arrives_as_itself(serve: Any) -> None:
    """gRPC drops trailers above 8 KiB: an error echoing a long value must not turn into another error."""
    long = errors.InvalidArgument(
        "\u20ac\n" * 5000, field="\u20ac" * 5000, limit="\u20ac" * 5000, value="\U0001f600" * 5000
    )
    exc = await _fail(serve, long)
    assert exc.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "limit \u20ac" in exc.details() and "value \U0001f600" in exc.details()
    assert errors.error_from_rpc(exc).field


async def test_request_that_is_no_message_is_the_callers_fault(serve: Any, read_all: Any, text: Any) -> None:
    async def generate(request: Any, context: Any) -> Any:
        yield text("fine")

    served = await serve(generate)
    async with grpc.aio.insecure_channel(served.target) as channel:
        for method in ("Generate", "GetLoad"):
            kind = channel.unary_stream if method == "Generate" else channel.unary_unary
            call = kind(f"/day0.llm.v1.LanguageService/{method}")(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if method == "Generate" else call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await read_all(served.stub.Generate(llm_pb2.GenerateRequest())) == "fine"


async def test_method_left_out_is_unimplemented(serve: Any) -> None:
    async def generate(request: Any, context: Any) -> Any:
        yield llm_pb2.GenerateResponse(delta=common_pb2.Delta())

    served = await serve(generate)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.GetModelInfo(llm_pb2.GetModelInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_abort_by_the_handler_is_kept(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def generate(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(grpc.StatusCode.ABORTED, "mine")
        yield

    served = await serve(generate)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(llm_pb2.GenerateRequest()).read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "mine")
    assert errors.error_from_rpc(caught.value).message == "ABORTED: mine"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_message_is_completed_once() -> None:
    assert str(errors.InvalidArgument("n is 9, limit 4", field="n", limit=4, value=9)) == "n is 9, limit 4"
    assert str(errors.InvalidArgument("too many", field="n", limit=4, value=9)) == "n: too many (limit 4, value 9)"
    assert str(errors.InvalidArgument("too many", field="n", value=0)) == "n: too many (value 0)"
