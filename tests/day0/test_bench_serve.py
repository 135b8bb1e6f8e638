"""`day0 bench serve` against a router: what it sends, shows, writes and exits with."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest

from day0.bench.compare import same_tokens
from day0.bench.load import Outcome, send_all
from day0.bench.upstream import UpstreamRun
from day0.cli import run
from day0.client import Answer, RouterClient
from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2, router_pb2_grpc
from svc_common.errors import ErrorInterceptor, ResourceExhausted


class CountingRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers `max_tokens` tokens, refuses a prompt whose first id is in `refused`, and counts who is there at once."""

    def __init__(self) -> None:
        self.target = ""
        self.requests: list[router_pb2.GenerateRequest] = []
        self.refused: Callable[[int], bool] = lambda number: False
        self.now = self.most = 0

    async def Generate(self, request, context):
        self.requests.append(request)
        if self.refused(len(self.requests)):
            raise ResourceExhausted("the queue is full", field="max_inflight_requests", limit=1, value=2)
        self.now += 1
        self.most = max(self.most, self.now)
        ids = request.completion.parts[-1].token_ids.ids
        for number in range(request.sampling.max_tokens):
            await asyncio.sleep(0.01)
            delta = common_pb2.Delta(text="x", token_ids=[number])
            yield router_pb2.GenerateResponse(delta=delta)
        self.now -= 1
        yield router_pb2.GenerateResponse(usage=common_pb2.Usage(prompt_tokens=len(ids), completion_tokens=1))

    async def GetModelInfo(self, request, context):
        return router_pb2.GetModelInfoResponse(info=common_pb2.ModelInfo(model=request.model or "m"))


@pytest.fixture
async def counting() -> AsyncIterator[CountingRouter]:
    servicer = CountingRouter()
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    servicer.target = f"127.0.0.1:{port}"
    yield servicer
    await server.stop(None)


async def bench(router: CountingRouter, *arguments: str) -> int:
    command = ["bench", "serve", "--target", router.target, "--random-input-len", "9", "--random-output-len", "3"]
    return await asyncio.to_thread(run, [*command, *arguments], {})


async def test_table(counting: CountingRouter, capfd: pytest.CaptureFixture[str]) -> None:
    assert await bench(counting, "--num-prompts", "6", "--max-concurrency", "2", "--num-warmups", "2") == 0
    shown = capfd.readouterr().out
    words = ("Successful requests", "Failed requests", "Benchmark duration (s)", "Request throughput (req/s)")
    latencies = [
        f"{kind} {name} (ms)" for name in ("TTFT", "TPOT", "ITL", "E2EL") for kind in ("Mean", "Median", "P99")
    ]
    assert [word for word in (*words, *latencies) if word not in shown] == []
    assert len(counting.requests) == 8 and counting.most == 2
    ids = [tuple(request.completion.parts[0].token_ids.ids) for request in counting.requests]
    assert len(set(ids)) == 8, "the warm-up must not send the measured prompts"
    assert {len(each) for each in ids} == {9} and all(100 <= token < 300 for each in ids for token in each)


async def test_json_and_saved_result(
    counting: CountingRouter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"]
    options = [
        "--num-prompts",
        "4",
        "--json",
        "--metric-percentiles",
        "50,90",
        "--goodput",
        "ttft:60000",
        "--model",
        "z",
    ]
    assert await bench(counting, *options, *file) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["completed"], shown["failed"], shown["model_id"]) == (4, 0, "z")
    assert (shown["total_input_tokens"], shown["total_output_tokens"]) == (36, 12)
    assert shown["request_goodput"] == shown["request_throughput"] > 0
    assert 0 < shown["p50_itl_ms"] <= shown["p90_itl_ms"]
    saved = json.loads((tmp_path / "new" / "r.json").read_text())
    assert {key: saved[key] for key in shown} == shown
    assert saved["output_lens"] == [3] * 4 and [len(itls) for itls in saved["itls"]] == [2] * 4


async def test_any_failure_is_the_exit_status(counting: CountingRouter, capfd: pytest.CaptureFixture[str]) -> None:
    counting.refused = lambda number: number in (2, 3)
    assert await bench(counting, "--num-prompts", "5", "--json") == 1
    streams = capfd.readouterr()
    result = json.loads(streams.out)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (3, 2, 9)
    assert "2 failed: RESOURCE_EXHAUSTED: max_inflight_requests" in streams.err


async def test_failed_warm_up_measures_nothing(counting: CountingRouter, capfd: pytest.CaptureFixture[str]) -> None:
    counting.refused = lambda number: True
    assert await bench(counting, "--num-prompts", "5", "--num-warmups", "1") == 1
    assert len(counting.requests) == 1 and "warm-up failed" in capfd.readouterr().err


async def test_no_router_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(run, ["bench", "serve", "--target", "127.0.0.1:1"], {}) == 1
    assert capfd.readouterr().err.startswith("day0: UNAVAILABLE: ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "-1"], "--burstiness"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio"),
        (["--random-mm-image-size", "0x9"], "--random-mm-image-size"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--goodput", "itl:5"], "--goodput"),
        (["--goodput", "ttft:nan"], "--goodput"),
        (["--tokenizer", "/no/such/folder"], "--tokenizer"),
        (["--compare-upstream", "/no/such/folder"], "--compare-upstream"),
        (["--compare-upstream", "/no/such/folder", "--target", "h:1"], "--target"),
        (["--compare-upstream", "/no/such/folder", "--dataset-name", "random-mm"], "--dataset-name"),
        (["--num-prompts", "0"], "--num-prompts"),
    ],
)
def test_bad_option_is_named(arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", *arguments], {}) == 2
    assert named in capfd.readouterr().err


async def test_a_request_is_timed_from_its_own_sending(counting: CountingRouter) -> None:
    request = router_pb2.GenerateRequest(
        completion=common_pb2.Completion(parts=[common_pb2.Part(token_ids=common_pb2.TokenIds(ids=[1]))]),
        sampling=common_pb2.SamplingParams(max_tokens=10),
    )
    async with RouterClient(counting.target) as client:
        began = time.monotonic()
        outcomes, duration = await send_all(client, [request] * 3, [0.0, 0.0, 0.4], max_concurrency=1)
    sent = [outcome.answer.sent_seconds - began for outcome in outcomes if outcome.answer is not None]
    assert counting.most == 1 and len(sent) == 3
    assert sent[1] >= 0.1 and sent[2] >= 0.4 and duration >= 0.5
    assert all(outcome.answer.ttft_seconds < 0.1 for outcome in outcomes if outcome.answer is not None)


def test_tokens_are_compared_request_by_request() -> None:
    def answered(ids: list[int]) -> Outcome:
        return Outcome(Answer(sent_seconds=0.0, token_ids={0: ids}))

    alone = UpstreamRun([[1, 2], [3]], 1.5)
    assert alone.tokens_per_second == 2
    assert same_tokens([answered([1, 2]), answered([3])], alone)
    assert not same_tokens([answered([1, 2]), answered([4])], alone)
    assert not same_tokens([answered([1, 2]), Outcome(None, "failed")], alone)
