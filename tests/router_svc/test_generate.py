"""The walk through the router: order, pass-through, retry, cancel, deadline, flow control, many at once."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from protos.router.v1 import router_pb2
from svc_common.errors import InvalidArgument, Unavailable, error_from_rpc


def _accepted(request_id="replica-id"):
    return llm_pb2.GenerateResponse(accepted=common_pb2.Accepted(request_id=request_id))


def _delta(text):
    return llm_pb2.GenerateResponse(delta=common_pb2.Delta(text=text))


async def test_events_and_parts_keep_their_order_and_content(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm)
    sampling = common_pb2.SamplingParams(temperature=0.0, seed=5, stop=["x"], logit_bias={3: 1.5})
    request = chat("first:", b"red", "second:", b"blue", model="tiny", sampling=sampling)
    events = await router.generate(request)
    assert [event.WhichOneof("event") for event in events] == ["accepted", "delta", "finished", "usage"]
    assert events[1].delta.token_ids == [7]
    assert events[3].usage.completion_tokens == 2
    # The client learns the router's id, as in the router's logs, not the replica's.
    assert events[0].accepted.request_id not in ("", "replica-id")
    seen = llm.requests[0]
    assert seen.chat == request.chat
    assert seen.sampling == sampling and seen.sampling.HasField("temperature")
    assert seen.model == "tiny"


async def test_completion_with_token_ids_passes_and_unset_sampling_stays_unset(start_llm, start_router):
    llm = await start_llm()
    router = await start_router(llm)
    parts = [common_pb2.Part(token_ids=common_pb2.TokenIds(ids=[1, 2])), common_pb2.Part(text="tail")]
    request = router_pb2.GenerateRequest(completion=common_pb2.Completion(parts=parts))
    await router.generate(request)
    assert llm.requests[0].completion == request.completion
    assert not llm.requests[0].HasField("sampling")


async def test_retry_before_the_first_token_sends_one_acceptance(start_llm, start_router, chat):
    failing, healthy = await start_llm("failing"), await start_llm("healthy")

    async def accept_then_fail(request, context):
        yield _accepted()
        raise Unavailable("the encoder is away", reason="VISION_UNAVAILABLE")

    failing.answer = accept_then_fail
    router = await start_router(failing, healthy, affinity_extra_requests=0)
    for _ in range(8):
        events = await router.generate(chat())
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["accepted", "delta", "finished", "usage"]
        assert events[1].delta.text == "from healthy"
    assert failing.requests, "eight draws of two reach the failing one but for 1 in 256"
    assert router.metric("request_retries_total") == len(failing.requests)


async def test_no_retry_after_the_first_token_and_the_status_passes_with_details(start_llm, start_router, chat):
    llms = [await start_llm("a"), await start_llm("b")]

    async def break_off(request, context):
        yield _accepted()
        yield _delta("half")
        raise Unavailable("drained", field="drain_seconds", limit=30, reason="DRAINING")

    for llm in llms:
        llm.answer = break_off
    router = await start_router(*llms)
    texts = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for event in router.stub.Generate(chat()):
            texts.append(event.delta.text)
    assert texts == ["", "half"]
    error = error_from_rpc(caught.value)
    assert isinstance(error, Unavailable)
    assert (error.reason, error.field, error.limit) == ("DRAINING", "drain_seconds", "30")
    assert len(llms[0].requests) + len(llms[1].requests) == 1
    assert router.metric("request_retries_total") == 0


async def test_other_failures_are_not_retried(start_llm, start_router, chat):
    llms = [await start_llm("a"), await start_llm("b")]

    async def refuse(request, context):
        raise InvalidArgument("sampling.top_p: 7 is not in (0, 1]", field="sampling.top_p", limit=1, value=7)
        yield

    for llm in llms:
        llm.answer = refuse
    router = await start_router(*llms)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat())
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.value) == ("sampling.top_p", "7")
    assert len(llms[0].requests) + len(llms[1].requests) == 1
    assert router.metric("request_failure_total", status="INVALID_ARGUMENT") == 1


async def test_attempts_are_bounded(start_llm, start_router, chat):
    llms = [await start_llm(str(index)) for index in range(4)]

    async def fail(request, context):
        raise Unavailable("not now", reason="BUSY")
        yield

    for llm in llms:
        llm.answer = fail
    router = await start_router(*llms, max_attempts=3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "not now" in caught.value.details()
    assert sum(len(llm.requests) for llm in llms) == 3


async def test_cancel_reaches_the_replica_and_the_next_request_works(start_llm, start_router, chat, until):
    llm = await start_llm()

    async def endless(request, context):
        yield _accepted()
        yield _delta("one")
        await asyncio.Event().wait()

    llm.answer = endless
    router = await start_router(llm)
    call = router.stub.Generate(chat())
    await call.read()
    assert (await call.read()).delta.text == "one"
    call.cancel()
    async with asyncio.timeout(5):
        await llm.cancelled.wait()
    await until(lambda: llm.open_streams == 0)
    await until(lambda: router.metric("num_requests_running") == 0)
    await until(lambda: router.metric("request_failure_total", status="CANCELLED") == 1)
    llm.answer = llm.short_answer
    assert await router.text(chat()) == "from a"


async def test_cancel_before_the_first_event_reaches_the_replica(start_llm, start_router, chat, until):
    llm = await start_llm()

    async def silent(request, context):
        await asyncio.Event().wait()
        yield

    llm.answer = silent
    router = await start_router(llm)
    call = router.stub.Generate(chat())
    reading = asyncio.create_task(call.read())
    await until(lambda: llm.open_streams == 1)
    call.cancel()
    async with asyncio.timeout(5):
        await llm.cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_deadline_passes_on_and_ends_a_long_answer(start_llm, start_router, chat, until):
    llm = await start_llm()

    async def endless(request, context):
        yield _accepted()
        await asyncio.Event().wait()

    llm.answer = endless
    router = await start_router(llm)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat(), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # gRPC rounds a deadline up to whole milliseconds at each hop.
    assert 0 < llm.deadlines_seconds[0] <= 0.305
    await until(lambda: llm.open_streams == 0)
    await until(lambda: router.metric("request_failure_total", status="DEADLINE_EXCEEDED") == 1)


async def test_the_service_sets_a_deadline_where_the_client_has_none(start_llm, start_router, chat, until):
    llm = await start_llm()

    async def endless(request, context):
        yield _accepted()
        await asyncio.Event().wait()

    llm.answer = endless
    router = await start_router(llm, default_deadline_seconds=0.2, max_deadline_seconds=0.25)
    for client_timeout in (None, 3600):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(chat(), timeout=client_timeout)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert llm.deadlines_seconds[-1] <= 0.255
    await until(lambda: llm.open_streams == 0)


async def test_a_deadline_that_is_over_leaves_nothing_running(start_llm, start_router, chat, until):
    """What is left of it on the way, a millisecond at most, may reach the replica; then the call is ended there too."""
    llm = await start_llm()
    router = await start_router(llm)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat(), timeout=0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: llm.open_streams == 0)
    assert all(left < 0.005 for left in llm.deadlines_seconds)
    assert await router.text(chat()) == "from a"


async def test_a_five_megabyte_picture_passes_both_ways(start_llm, start_router, chat):
    llm = await start_llm()

    async def large_answer(request, context):
        yield _delta("x" * 5_000_000)

    llm.answer = large_answer
    router = await start_router(llm)
    picture = bytes(5_000_000)
    assert len(await router.text(chat("look", picture))) == 5_000_000
    assert llm.requests[0].chat.messages[0].parts[1].image.data == picture


async def test_a_message_above_the_limit_names_limit_and_size(start_llm, start_router, chat):
    llm = await start_llm()
    limits = {
        "max_message_bytes": 1_000_000,
        "max_text_bytes": 1000,
        "max_image_bytes": 500,
        "max_total_image_bytes": 500,
    }
    router = await start_router(llm, **limits)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat(bytes(1_500_000)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1000000" in caught.value.details() and "15000" in caught.value.details()
    assert await router.text(chat()) == "from a"


async def test_a_slow_reader_stalls_the_replica_and_nobody_else(start_llm, start_router, chat, until):
    llm = await start_llm()
    text = "x" * 2048

    async def long_answer(request, context):
        for _ in range(10_000):
            yield _delta(text)

    llm.answer = long_answer
    router = await start_router(llm)
    call = aiter(router.stub.Generate(chat()))
    await anext(call)
    stalled_at = -1

    async def settle():
        # Flow control has no event of its own: stalled is two equal looks with a real round trip of requests between.
        nonlocal stalled_at
        while stalled_at != llm.sent:
            stalled_at = llm.sent
            for _ in range(20):
                await router.stub.ListModels(router_pb2.ListModelsRequest())
            await asyncio.sleep(0.1)

    async with asyncio.timeout(20):
        await settle()
    # What lies between is flow-control windows, 20 MB would be all of it.
    assert 0 < stalled_at < 9_000
    llm.answer = llm.short_answer
    assert await router.text(chat()) == "from a"
    received = 1
    async for event in call:
        assert event.delta.text == text
        received += 1
    assert received == 10_000


async def test_a_reader_that_never_reads_is_given_up_at_the_deadline(start_llm, start_router, chat, until):
    llm = await start_llm()

    async def long_answer(request, context):
        for _ in range(10_000):
            yield _delta("x" * 2048)

    llm.answer = long_answer
    router = await start_router(llm, default_deadline_seconds=1.5)
    call = aiter(router.stub.Generate(chat()))
    await anext(call)
    await until(lambda: router.metric("request_failure_total", status="DEADLINE_EXCEEDED") == 1)
    await until(lambda: llm.open_streams == 0)
    assert router.metric("num_requests_running") == 0
    assert all(replica.in_flight == 0 for replica in router.router.replicas.all())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: router.router.server.running_calls == 0)


async def test_two_hundred_at_once_all_end_and_gauges_return_to_zero(start_llm, start_router, chat, until):
    llms = [await start_llm(name) for name in "abc"]
    gate = asyncio.Event()

    async def gated(request, context):
        yield _accepted()
        await gate.wait()
        yield _delta("ok")

    for llm in llms:
        llm.answer = gated
    router = await start_router(*llms)
    requests = [asyncio.create_task(router.text(chat(f"question {index}", b"picture"))) for index in range(200)]
    await until(lambda: sum(llm.open_streams for llm in llms) == 200)
    assert router.metric("num_requests_running") == 200
    # Bounded loads: no replica is far from its third.
    assert max(llm.open_streams for llm in llms) - min(llm.open_streams for llm in llms) <= 5
    gate.set()
    assert await asyncio.gather(*requests) == ["ok"] * 200
    await until(lambda: router.router.server.running_calls == 0)
    for name in ("num_requests_running", "num_requests_waiting"):
        assert router.metric(name) == 0
    assert all(replica.in_flight == 0 for replica in router.router.replicas.all())
    assert router.metric("e2e_request_latency_seconds_count") == 200
    assert router.metric("time_to_first_token_seconds_count") == 200


async def test_a_hundred_cancels_at_any_moment_leave_nothing(start_llm, start_router, chat, until):
    llms = [await start_llm(name) for name in "ab"]

    async def slow(request, context):
        yield _accepted()
        for _ in range(50):
            yield _delta("x")
            await asyncio.sleep(0.002)

    for llm in llms:
        llm.answer = slow
    router = await start_router(*llms)

    async def cancel_after(events):
        call = router.stub.Generate(chat(str(events)))
        try:
            for _ in range(events):
                await call.read()
        finally:
            call.cancel()

    await asyncio.gather(*(cancel_after(index % 40) for index in range(100)))
    await until(lambda: router.router.server.running_calls == 0)
    await until(lambda: all(llm.open_streams == 0 for llm in llms))
    assert router.metric("num_requests_running") == 0 and router.metric("num_requests_waiting") == 0
    assert all(replica.in_flight == 0 for replica in router.router.replicas.all())
