"""What is refused at the door, and that the message names field, limit and value (cases 34, 40)."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from protos.router.v1 import router_pb2
from svc_common.errors import InvalidArgument, ResourceExhausted, error_from_rpc

LIMITS = {
    "max_messages": 3,
    "max_parts": 5,
    "max_images": 2,
    "max_text_bytes": 20,
    "max_prompt_token_ids": 4,
    "max_label_bytes": 6,
    "max_stop_strings": 2,
    "max_stop_bytes": 4,
    "max_stop_token_ids": 2,
    "max_logit_bias": 2,
    "max_logprobs": 3,
    "max_choices": 4,
    "max_answer_tokens": 100,
}


def _messages(count):
    messages = [common_pb2.Message(role=common_pb2.ROLE_USER) for _ in range(count)]
    messages[0].parts.add(text="hi")
    return {"chat": common_pb2.Chat(messages=messages)}


def _texts(*texts):
    return {"completion": common_pb2.Completion(parts=[common_pb2.Part(text=text) for text in texts])}


def _images(count, label=""):
    image = common_pb2.Image(data=b"x", label=label)
    return {"completion": common_pb2.Completion(parts=[common_pb2.Part(image=image)] * count)}


def _ids(*counts):
    parts = [common_pb2.Part(token_ids=common_pb2.TokenIds(ids=[1] * count)) for count in counts]
    return {"completion": common_pb2.Completion(parts=parts)}


def _sampling(**values):
    return _texts("hi") | {"sampling": common_pb2.SamplingParams(**values)}


CASES = [
    ("max_messages", ResourceExhausted, _messages(3), _messages(4), 4),
    ("max_parts", ResourceExhausted, _texts(*"abcde"), _texts(*"abcdef"), 6),
    ("max_images", ResourceExhausted, _images(2), _images(3), 3),
    ("max_text_bytes", ResourceExhausted, _texts("a" * 10, "\u00e9" * 5), _texts("a" * 10, "\u00e9" * 5 + "b"), 21),
    ("max_prompt_token_ids", ResourceExhausted, _ids(2, 2), _ids(2, 3), 5),
    ("max_label_bytes", ResourceExhausted, _images(1, "\u00e9" * 3), _images(1, "\u00e9" * 4), 8),
    ("max_stop_strings", ResourceExhausted, _sampling(stop=["a", "b"]), _sampling(stop=["a", "b", "c"]), 3),
    ("max_stop_bytes", ResourceExhausted, _sampling(stop=["\u00e9\u00e9"]), _sampling(stop=["\u00e9\u00e9b"]), 5),
    ("max_stop_token_ids", ResourceExhausted, _sampling(stop_token_ids=[1, 2]), _sampling(stop_token_ids=[1, 2, 3]), 3),
    (
        "max_logit_bias",
        ResourceExhausted,
        _sampling(logit_bias={1: 1, 2: 1}),
        _sampling(logit_bias={1: 1, 2: 1, 3: 1}),
        3,
    ),
    ("max_logprobs", InvalidArgument, _sampling(logprobs=3), _sampling(logprobs=4), 4),
    ("max_choices", ResourceExhausted, _sampling(n=4), _sampling(n=5), 5),
    ("max_answer_tokens", ResourceExhausted, _sampling(n=4, max_tokens=25), _sampling(n=4, max_tokens=26), 104),
    ("max_answer_tokens", ResourceExhausted, _sampling(max_tokens=100), _sampling(max_tokens=101), 101),
]


@pytest.mark.parametrize(("setting", "kind", "fits", "too_much", "value"), CASES)
async def test_each_limit_is_exact_and_named(start_llm, start_router, setting, kind, fits, too_much, value):
    llm = await start_llm()
    router = await start_router(llm, **LIMITS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(router_pb2.GenerateRequest(**too_much))
    error = error_from_rpc(caught.value)
    assert isinstance(error, kind)
    assert f"{value} is more than {setting} {LIMITS[setting]}" in error.message
    assert (error.limit, error.value) == (str(LIMITS[setting]), str(value))
    assert error.field
    assert not llm.requests
    await router.generate(router_pb2.GenerateRequest(**fits))
    assert len(llm.requests) == 1


async def test_half_a_million_stop_strings_are_refused(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat(sampling=common_pb2.SamplingParams(stop=["x"] * 500_000)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "500000 is more than max_stop_strings 16" in caught.value.details()


@pytest.mark.parametrize(
    "request_message",
    [
        router_pb2.GenerateRequest(),
        router_pb2.GenerateRequest(
            completion=common_pb2.Completion(parts=[common_pb2.Part(text="a"), common_pb2.Part()])
        ),
    ],
)
async def test_what_is_not_set_is_named(start_llm, start_router, request_message):
    router = await start_router(await start_llm())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(request_message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "input" in caught.value.details() or "completion.parts[1]" in caught.value.details()


async def test_bytes_that_are_no_request_are_the_callers_fault(start_llm, start_router):
    router = await start_router(await start_llm())
    call = router.channel.unary_stream("/day0.router.v1.RouterService/Generate")(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_and_bytes_in_flight_are_limited(start_llm, start_router, chat, until):
    llm = await start_llm()
    gate = asyncio.Event()

    async def gated(request, context):
        await gate.wait()
        yield llm_pb2.GenerateResponse(usage=common_pb2.Usage())

    llm.answer = gated
    router = await start_router(llm, max_inflight_requests=2, max_inflight_bytes=5000)
    running = [asyncio.create_task(router.generate(chat(bytes(1000)))) for _ in range(2)]
    await until(lambda: llm.open_streams == 2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat())
    error = error_from_rpc(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert "3 is more than max_inflight_requests 2" in error.message
    gate.set()
    await asyncio.gather(*running)
    await router.generate(chat(bytes(4000)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat(bytes(5000)))
    assert "max_inflight_bytes 5000" in caught.value.details()
    assert router.metric("request_failure_total", status="RESOURCE_EXHAUSTED") == 2


async def test_load_is_shed_only_when_every_replica_is_full(start_llm, start_router, chat, until):
    llms = [await start_llm("a"), await start_llm("b")]
    for llm in llms:
        llm.load.queued_tokens = 2001
    router = await start_router(*llms, max_queued_tokens=2000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat())
    error = error_from_rpc(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert "2001 is more than max_queued_tokens 2000" in error.message
    assert (error.limit, error.value) == ("2000", "2001")
    llms[1].load.queued_tokens = 2000
    await until(lambda: {replica.queued_tokens for replica in router.router.replicas.all()} == {2000, 2001})
    await router.generate(chat())
    assert len(llms[0].requests) + len(llms[1].requests) == 1
