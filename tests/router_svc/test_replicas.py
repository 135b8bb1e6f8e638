"""Which replica takes a request: readiness, load, affinity, discovery, models."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from protos.router.v1 import router_pb2
from router_svc.affinity import affinity_key, preferred_order
from router_svc.choice import choose
from svc_common.errors import InvalidArgument, NotFound, Unavailable, error_from_rpc
from svc_common.targets import Target
from tests.cluster_api import TOKEN, ClusterApi, endpoint_slice


async def _refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_distinct_prompts_spread_over_three_replicas(start_llm, start_router, chat):
    llms = [await start_llm(name) for name in "abc"]
    router = await start_router(*llms)
    for index in range(60):
        await router.generate(chat(f"question {index}"))
    # 20 each on average; the chance of fewer than 6 for one is below 1 in 10,000.
    assert min(len(llm.requests) for llm in llms) >= 6


async def test_equal_prefixes_and_growing_conversations_meet_one_replica(start_llm, start_router, chat):
    llms = [await start_llm(name) for name in "abc"]
    router = await start_router(*llms)
    used = set()
    for _ in range(10):
        used.add(await router.text(chat("tell me about", b"this picture")))
    request = chat("tell me about", b"this picture")
    for turn in range(5):
        request.chat.messages.add(role=common_pb2.ROLE_ASSISTANT).parts.add(text=f"answer {turn}")
        request.chat.messages.add(role=common_pb2.ROLE_USER).parts.add(image=common_pb2.Image(data=bytes([turn + 1])))
        used.add(await router.text(request))
    assert len(used) == 1


async def test_a_popular_prefix_spills_over_when_its_replica_is_busy(start_llm, start_router, chat, until):
    llms = [await start_llm(name) for name in "abc"]
    gate = asyncio.Event()

    async def gated(request, context):
        await gate.wait()
        yield llm_pb2.GenerateResponse(usage=common_pb2.Usage())

    for llm in llms:
        llm.answer = gated
    router = await start_router(*llms, affinity_extra_requests=2)
    requests = [asyncio.create_task(router.generate(chat("popular"))) for _ in range(12)]
    await until(lambda: sum(llm.open_streams for llm in llms) == 12)
    # The first choice takes 3, then the second takes 3; each further one of the third lets both take one more.
    assert sorted(llm.open_streams for llm in llms) == [2, 5, 5]
    gate.set()
    await asyncio.gather(*requests)


async def test_load_that_others_cause_is_avoided(start_llm, start_router, chat, until):
    busy, idle = await start_llm("busy"), await start_llm("idle")
    busy.load.running_sequences = 50
    router = await start_router(busy, idle)
    for index in range(10):
        assert await router.text(chat(f"question {index}")) == "from idle"
    # It frees up, and the other one has much token-work waiting.
    busy.load.running_sequences = 0
    idle.load.queued_tokens = 10_000_000
    await until(lambda: {replica.queued_tokens for replica in router.router.replicas.all()} == {0, 10_000_000})
    await until(lambda: all(replica.open_requests == 0 for replica in router.router.replicas.all()))
    for index in range(10):
        assert await router.text(chat(f"question {index}")) == "from busy"


async def test_a_replica_that_dies_and_comes_back(start_llm, start_router, chat, until):
    mortal, other = await start_llm("mortal"), await start_llm("other")
    # With this poll only a request can notice the death within the test.
    router = await start_router(mortal, other, affinity_extra_requests=0, load_poll_seconds=60)
    await mortal.stop()
    # No request fails, and only the first to meet the dead one has to be retried.
    assert {await router.text(chat()) for _ in range(20)} == {"from other"}
    await router.wait_ready(1)
    assert router.metric("request_retries_total") == 1
    # Each failed probe starts over with a new connection: gRPC lets an old one wait for up to two minutes.
    replica = next(replica for replica in router.router.replicas.all() if replica.name == mortal.target)
    stub = replica.stub
    await until(lambda: replica.stub is not stub)
    assert router.metric("ready_replicas", model="tiny") == 1
    await mortal.start()
    await router.wait_ready(2)
    assert router.metric("ready_replicas", model="tiny") == 2
    assert {await router.text(chat()) for _ in range(40)} == {"from other", "from mortal"}


async def test_a_broken_connection_ends_readiness_before_any_probe(start_llm, start_router):
    router = await start_router(await start_llm())
    replica = router.router.replicas.all()[0]
    replica.suspect("busy", gone=False)
    assert replica.ready
    replica.suspect("connection refused", gone=True)
    assert (replica.ready, replica.reason) == (False, "connection refused")
    await router.wait_ready(1)


async def test_a_replica_that_loads_or_drains_gets_nothing(start_llm, start_router, chat):
    loading, other = await start_llm("loading"), await start_llm("other")
    loading.unavailable = Unavailable("weights are being read", reason="LOADING")
    router = await start_router(loading, other, ready=1)
    for index in range(10):
        assert await router.text(chat(str(index))) == "from other"
    assert not loading.requests
    loading.unavailable = None
    await router.wait_ready(2)
    other.unavailable = Unavailable("the service is draining", reason="DRAINING")
    await router.wait_ready(1)
    assert await router.text(chat()) == "from loading"


async def test_an_answer_without_a_model_is_no_model(start_llm, start_router, chat, until):
    """GetModelInfo of a service that starts answers with its stage and no model; that is no model without a name."""
    starting, other = await start_llm("starting"), await start_llm("other")
    starting.startup_stage = "load"
    router = await start_router(starting, other, ready=1)
    replica = next(each for each in router.router.replicas.all() if each.name == starting.target)
    await until(lambda: "startup stage load" in replica.reason)
    assert (replica.ready, replica.info) == (False, None)
    models = (await router.stub.ListModels(router_pb2.ListModelsRequest())).models
    assert [model.model for model in models] == ["tiny"]
    assert {await router.text(chat(str(index))) for index in range(10)} == {"from other"}
    starting.startup_stage = "ready"
    await router.wait_ready(2)
    starting.startup_stage = "load"
    await router.wait_ready(1)
    assert router.metric("ready_replicas", model="tiny") == 1


async def test_a_replica_may_be_late_a_few_times_but_not_for_ever(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm, probe_timeout_seconds=0.1, probe_timeouts_allowed=2)
    llm.stalled = True
    await router.wait_ready(0)
    assert llm.probes_while_stalled == 3
    assert isinstance(await _refusal(router.generate(chat())), Unavailable)
    llm.stalled = False
    await router.wait_ready(1)
    assert await router.text(chat()) == "from a"


async def test_no_ready_replica_is_unavailable_with_the_reason(start_llm, start_router, chat):
    llm = await start_llm()
    llm.unavailable = Unavailable("weights are being read: 40 of 90 GB", reason="LOADING")
    router = await start_router(llm, ready=0)
    error = await _refusal(router.generate(chat()))
    while "not probed yet" in error.message:
        error = await _refusal(router.generate(chat()))
    assert isinstance(error, Unavailable) and error.reason == "NO_READY_REPLICA"
    assert "40 of 90 GB" in error.message and llm.target in error.message
    assert (await router.stub.ListModels(router_pb2.ListModelsRequest())).models == []
    info = await _refusal(router.stub.GetModelInfo(router_pb2.GetModelInfoRequest()))
    assert isinstance(info, Unavailable)


async def test_something_else_behind_a_target_is_not_a_replica(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm)
    wrong = await start_router(ready=0, llm_targets=(f"127.0.0.1:{router.router.server.grpc_port}",))
    error = await _refusal(wrong.generate(chat()))
    while "not probed yet" in error.message:
        error = await _refusal(wrong.generate(chat()))
    assert "UNIMPLEMENTED" in error.message


async def test_models_are_told_apart_and_unknown_names_are_refused(start_llm, start_router, chat):
    llms = [await start_llm("a", "small"), await start_llm("b", "large"), await start_llm("c", "large")]
    router = await start_router(*llms)
    models = (await router.stub.ListModels(router_pb2.ListModelsRequest())).models
    assert [model.model for model in models] == ["large", "small"]
    info = await router.stub.GetModelInfo(router_pb2.GetModelInfoRequest(model="large"))
    assert (info.info.model, info.info.context_tokens, info.ready_replicas) == ("large", 4096, 2)
    for _ in range(3):
        assert await router.text(chat(model="small")) == "from a"
    assert llms[0].requests[0].model == "small"
    unknown = await _refusal(router.generate(chat(model="huge")))
    assert isinstance(unknown, NotFound)
    assert "'huge'" in unknown.message and "large, small" in unknown.message
    empty = await _refusal(router.generate(chat()))
    assert isinstance(empty, InvalidArgument) and "large, small" in empty.message


async def test_a_known_model_without_ready_replica_is_unavailable_not_unknown(start_llm, start_router, chat):
    llms = [await start_llm("a", "small"), await start_llm("b", "large")]
    router = await start_router(*llms)
    await llms[1].stop()
    await router.wait_ready(1)
    assert isinstance(await _refusal(router.generate(chat(model="large"))), Unavailable)
    assert isinstance(await _refusal(router.generate(chat(model="huge"))), NotFound)
    assert await router.text(chat(model="small")) == "from a"


async def test_dns_name_is_looked_up_again_and_gives_one_replica_per_address(
    start_llm, start_router, chat, monkeypatch, until
):
    first = await start_llm("first", host="127.0.0.1")
    second = await start_llm("second", host="127.0.0.2", port=first.port)
    genuine, addresses, failures = socket.getaddrinfo, ["127.0.0.1"], []

    def headless(host, port, *args, **options):
        if host != "llm.test":
            return genuine(host, port, *args, **options)
        if not addresses:
            failures.append(socket.gaierror("no such name"))
            raise failures[-1]
        return [answer for address in addresses for answer in genuine(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", headless)
    router = await start_router(ready=1, llm_targets=(f"dns:///llm.test:{first.port}",))
    assert {await router.text(chat(str(index))) for index in range(20)} == {"from first"}
    addresses.append("127.0.0.2")
    await router.wait_ready(2)
    assert {await router.text(chat(str(index))) for index in range(40)} == {"from first", "from second"}
    # A stream on an address that leaves the name (a pod that drains) ends in its own time.
    gate = asyncio.Event()

    async def gated(request, context):
        yield llm_pb2.GenerateResponse(accepted=common_pb2.Accepted())
        await gate.wait()
        yield llm_pb2.GenerateResponse(delta=common_pb2.Delta(text="to the end"))

    first.answer = second.answer = gated
    running = [asyncio.create_task(router.text(chat(str(index)))) for index in range(20)]
    await until(lambda: first.open_streams + second.open_streams == 20 and first.open_streams > 0)
    addresses.remove("127.0.0.1")
    await until(lambda: [replica.name for replica in router.router.replicas.all()] == [second.target])
    gate.set()
    assert await asyncio.gather(*running) == ["to the end"] * 20
    second.answer = second.short_answer
    assert await router.text(chat()) == "from second"
    # A look-up that fails keeps what is known.
    addresses.clear()
    await until(lambda: len(failures) >= 2)
    assert await router.text(chat()) == "from second"


async def test_endpoints_of_a_kubernetes_service_are_replicas(start_llm, start_router, chat, tmp_path, until):
    first = await start_llm("first", host="127.0.0.1")
    second = await start_llm("second", host="127.0.0.2", port=first.port)
    (tmp_path / "token").write_text(TOKEN)
    api = ClusterApi()
    api.put(endpoint_slice("llm-a", "127.0.0.1", port=first.port))
    router = await start_router(
        ready=1,
        llm_targets=(f"kubernetes:///llm.day0:{first.port}",),
        kubernetes_api_url=api.url,
        kubernetes_token_path=str(tmp_path / "token"),
    )
    assert {await router.text(chat(str(index))) for index in range(20)} == {"from first"}
    api.put(endpoint_slice("llm-a", "127.0.0.1", "127.0.0.2", port=first.port, terminating=("127.0.0.1",)))
    await until(lambda: [replica.name for replica in router.router.replicas.all()] == [second.target])
    await router.wait_ready(1)
    assert {await router.text(chat(str(index))) for index in range(20)} == {"from second"}
    api.close()


async def test_localhost_by_dns(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(ready=1, llm_targets=(f"dns:///localhost:{llm.port}",))
    assert await router.text(chat()) == "from a"


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "host:0", "host:65536", "host:x", "http://h:1", "::1:5", "h :1"]
)
def test_bad_targets_are_quoted(text):
    with pytest.raises(ValueError, match="host:port"):
        Target.parse(text)


def test_targets_are_read():
    assert Target.parse("host:5") == Target("host", 5, "address")
    assert Target.parse("[::1]:5") == Target("::1", 5, "address")
    assert Target.parse("dns:///llm.default.svc:50051") == Target("llm.default.svc", 50051, "dns")
    assert Target.parse("kubernetes:///llm.day0:50051") == Target("llm.day0", 50051, "kubernetes")


def _completion(*parts):
    return llm_pb2.GenerateRequest(completion=common_pb2.Completion(parts=parts))


def test_the_key_covers_prefix_and_pictures_and_nothing_else():
    text = common_pb2.Part(text="a" * 100)
    red = common_pb2.Part(image=common_pb2.Image(data=b"red", label="1"))
    same = common_pb2.Part(image=common_pb2.Image(data=b"red", label="2"))
    blue = common_pb2.Part(image=common_pb2.Image(data=b"blue"))
    key = affinity_key(_completion(text, red), 50)
    assert key == affinity_key(_completion(text, same), 50)
    assert key == affinity_key(_completion(common_pb2.Part(text="a" * 50 + "b"), red), 50)
    halves = [common_pb2.Part(text="a" * 30), common_pb2.Part(text="a" * 30)]
    assert affinity_key(_completion(*halves), 50) == affinity_key(_completion(text), 50)
    others = [
        _completion(text, blue),
        _completion(halves[0], common_pb2.Part(text="a" * 19 + "b"), red),
        _completion(red, text),
        _completion(text),
        _completion(common_pb2.Part(text="a" * 49 + "b"), red),
        _completion(common_pb2.Part(token_ids=common_pb2.TokenIds(ids=[97])), red),
    ]
    assert key not in {affinity_key(other, 50) for other in others}


def test_a_lost_replica_moves_only_its_own_keys():
    names = [f"10.0.0.{index}:50051" for index in range(5)]
    keys = [bytes([index, index // 256]) * 16 for index in range(200)]
    before = {key: preferred_order(key, names)[0] for key in keys}
    after = {key: preferred_order(key, names[1:])[0] for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != names[0])
    assert set(before.values()) == set(names)


class _Fake:
    def __init__(self, name, open_requests, queued_tokens=0):
        self.name, self.open_requests, self.queued_tokens = name, open_requests, queued_tokens


def test_least_load_counts_requests_then_token_work():
    replicas = [_Fake("a", 3), _Fake("b", 1, 50), _Fake("c", 1, 40)]
    assert choose(replicas, b"key", extra_requests=0, extra_tokens=1000).name == "c"


def test_no_preference_is_followed_where_every_replica_is_far_above_in_one_measure():
    replicas = [_Fake("a", 100, 0), _Fake("b", 0, 1_000_000)]
    for key in (b"1", b"2", b"3", b"4"):
        assert choose(replicas, key, extra_requests=4, extra_tokens=1000).name == "b"
