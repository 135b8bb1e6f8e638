"""Requests go the whole way through three processes, give upstream's tokens, and leave nothing behind."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from day0.cli import run as run_day0
from day0.client import Answer, chat_request, completion_request, image_part, text_part
from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2
from svc_common.errors import ServiceError
from tests.llm_svc.conftest import Sample, Upstream, picture
from tests.services.conftest import Services
from tests.vision_svc.client import noise

DATA = Path(__file__).parents[1] / "data" / "images"
RED, BLUE = picture(1), picture(4, 70, 140)


@pytest.fixture(autouse=True)
def nothing_is_left(services: Services) -> Iterator[None]:
    """After every test a request works and all three services hold what they held at the start."""
    yield
    answer = services.run(services.ask(chat_request([text_part("still there?")], sampling=greedy(2))))
    assert answer.completion_tokens == 2
    services.run(services.until_all_is_back())


def greedy(max_tokens: int, **more: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, **more)


def about(image: bytes, max_tokens: int) -> router_pb2.GenerateRequest:
    return chat_request([image_part(image), text_part("What is this?")], sampling=greedy(max_tokens))


def upstream_tokens(upstream: Upstream, parts: list[str | bytes], new_tokens: int) -> list[int]:
    """What the unmodified model answers to one user turn of texts and pictures, through its own chat template."""
    content = [{"type": "image"} if isinstance(part, bytes) else {"type": "text", "text": part} for part in parts]
    ids = upstream.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    images = iter([part for part in parts if isinstance(part, bytes)])
    pieces: list[list[int] | bytes] = [[]]
    for token in ids:
        if token == upstream.config.image_token_id:
            pieces += [next(images), []]
        elif token not in (upstream.config.image_start_token_id, upstream.config.image_end_token_id):
            last = pieces[-1]
            assert isinstance(last, list)
            last.append(token)
    return upstream.generate(Sample(repr(parts), tuple(pieces)), new_tokens)


@pytest.mark.parametrize(
    "parts",
    [
        ["Hello there, what can you do?"],
        ["look: ", RED, " What is it?"],
        ["first: ", RED, " second: ", BLUE, " Which is larger?"],
        ["first: ", BLUE, " second: ", RED, " Which is larger?"],
    ],
    ids=["text", "image", "red-blue", "blue-red"],
)
def test_tokens_equal_the_unmodified_model(services: Services, upstream: Upstream, parts: list[str | bytes]) -> None:
    sent = [image_part(part) if isinstance(part, bytes) else text_part(part) for part in parts]
    answer = services.run(services.ask(chat_request(sent, sampling=greedy(24))))
    assert answer.token_ids[0] == upstream_tokens(upstream, parts, 24)
    assert answer.text == upstream.tokenizer.decode(answer.token_ids[0], skip_special_tokens=True)
    assert answer.reasons == {0: "length"}
    assert (answer.usage.visual_tokens > 0) is any(isinstance(part, bytes) for part in parts)


def test_swapping_the_pictures_swaps_the_answer(services: Services) -> None:
    def ask(one: bytes, other: bytes) -> list[int]:
        parts = [text_part("first: "), image_part(one), text_part(" second: "), image_part(other)]
        return services.run(services.ask(chat_request(parts, sampling=greedy(12)))).token_ids[0]

    assert ask(RED, BLUE) != ask(BLUE, RED)
    assert ask(RED, RED) != ask(RED, BLUE)


@pytest.mark.parametrize("name", ["rgba_hidden_red.png", "exif_6.jpg"])
def test_bytes_file_and_data_url_are_one_picture(services: Services, name: str) -> None:
    data = (DATA / name).read_bytes()
    kind = "png" if name.endswith("png") else "jpeg"
    sources: list[bytes | Path | str] = [
        data,
        DATA / name,
        f"data:image/{kind};base64,{base64.b64encode(data).decode()}",
    ]

    async def ask(source: bytes | Path | str) -> tuple[list[int], list[float], int]:
        request = chat_request([image_part(source), text_part("?")], sampling=greedy(8, logprobs=0))
        logprobs = []
        async for event in services.client.generate(request, timeout_seconds=60):
            if event.WhichOneof("event") == "delta":
                logprobs += [(place.chosen.token_id, place.chosen.logprob) for place in event.delta.logprobs]
            elif event.WhichOneof("event") == "usage":
                visual = event.usage.visual_tokens
        return [token for token, _ in logprobs], [logprob for _, logprob in logprobs], visual

    answers = [services.run(ask(source)) for source in sources]
    assert len(answers[0][0]) == 8 and answers[0][2] > 0
    assert answers[1] == answers[0] and answers[2] == answers[0]


def test_200_image_requests_at_once_all_end_and_leave_nothing(services: Services) -> None:
    images = [noise(seed, (84, 56)) for seed in range(100, 117)]
    # Some pictures many times, some once.
    chosen = [*range(17), *random.Random(1).choices(range(9), k=183)]

    async def crowd() -> list[Answer | BaseException]:
        asks = [services.ask(about(images[which], 6)) for which in chosen]
        return await asyncio.gather(*asks, return_exceptions=True)

    results = services.run(crowd())
    assert [result for result in results if isinstance(result, BaseException)] == []
    assert len(results) == 200 and all(result.reasons == {0: "length"} for result in results)
    services.run(services.until_all_is_back())
    by_image: dict[int, set[tuple[int, ...]]] = {}
    for which, result in zip(chosen, results, strict=True):
        by_image.setdefault(which, set()).add(tuple(result.token_ids[0]))
    assert all(len(answers) == 1 for answers in by_image.values()), "neighbours changed an answer"
    assert len(set().union(*by_image.values())) > 8, "the pictures make no difference"
    alone = services.run(services.ask(about(images[0], 6)))
    assert {tuple(alone.token_ids[0])} == by_image[0]


def test_100_cancels_at_random_moments_leave_nothing(services: Services) -> None:
    images = [noise(seed, (84, 56)) for seed in range(200, 240)]
    chance = random.Random(2)
    moments: list[float | None] = [*(chance.uniform(0, 3) for _ in range(100)), *[None] * 100]
    chance.shuffle(moments)

    async def ask(number: int, moment_seconds: float | None) -> Answer | None:
        # Those to be cancelled would run on for long.
        max_tokens = 16 if moment_seconds is None else 400
        asking = asyncio.ensure_future(services.ask(about(images[number % 40], max_tokens)))
        if moment_seconds is not None:
            await asyncio.wait([asking], timeout=moment_seconds)
            if not asking.done():
                asking.cancel()
                await asyncio.wait([asking])
                return None
        return await asking

    async def crowd() -> list[Answer | None]:
        return await asyncio.gather(*(ask(number, moment) for number, moment in enumerate(moments)))

    results = services.run(crowd())
    cancelled = sum(result is None for result in results)
    assert cancelled >= 50, f"only {cancelled} of 100 were still running when they were cancelled"
    assert all(result.completion_tokens == 16 for result in results if result is not None)
    services.run(services.until_all_is_back())


def test_five_megabyte_picture(services: Services) -> None:
    data = noise(7, (1340, 1340))
    assert len(data) > 5 * 1024 * 1024
    answer = services.run(services.ask(about(data, 3)))
    assert answer.completion_tokens == 3 and answer.usage.visual_tokens == 64


@pytest.mark.parametrize("deadline_seconds", [0.05, 0.8])
def test_deadline_ends_every_hop(services: Services, deadline_seconds: float) -> None:
    request = about(noise(300 + round(deadline_seconds * 100), (300, 300)), 3500)
    began = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        services.run(services.ask(request, deadline_seconds))
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < deadline_seconds + 1
    # Sooner than the answer could be: 3500 tokens take far longer.
    services.run(services.until_all_is_back())


def test_bad_picture_is_named_through_all_hops(services: Services) -> None:
    parts = [image_part(RED), image_part((DATA / "html_as.png").read_bytes(), label="holiday"), image_part(BLUE)]
    with pytest.raises(ServiceError) as caught:
        services.run(services.ask(completion_request(parts, sampling=greedy(2))))
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "image 1" in caught.value.message and "holiday" in caught.value.message


@pytest.mark.parametrize("dataset", ["random", "random-mm"])
def test_bench_serve_counts_what_the_services_count(
    services: Services, tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str], dataset: str
) -> None:
    shape = ["--num-prompts", "6", "--random-input-len", "40", "--random-output-len", "5", "--ignore-eos"]
    pictures = ["--dataset-name", dataset, "--random-mm-image-size", "112x84", "--tokenizer", str(tiny_checkpoint)]
    command = ["bench", "serve", "--target", services.client.target, "--json", "--max-concurrency", "3"]
    assert run_day0([*command, *shape, *pictures], {}) == 0
    result = json.loads(capfd.readouterr().out)
    visual = 12 if dataset == "random-mm" else 0
    # The processor's own marks stand around a picture.
    around = 2 if visual else 0
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["total_input_tokens"] == 6 * (40 + visual + around)
    assert (result["total_visual_tokens"], result["total_output_tokens"]) == (6 * visual, 30)
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] < result["p99_e2el_ms"]
