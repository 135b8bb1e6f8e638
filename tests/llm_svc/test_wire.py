"""Requests off the wire: every bad field is refused by name, limit and value, and what is read is what was sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_svc.core import FinishReason, ImageInput, Logprob, PromptImage, PromptTokens, Request, SampledToken
from llm_svc.prompt import PromptBuilder
from llm_svc.request_limits import RequestLimits
from llm_svc.sampling_checks import GenerationDefaults, read_eos_ids
from llm_svc.wire import RequestReader, write_accepted, write_delta, write_finished, write_usage
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from svc_common.errors import InvalidArgument, NotFound, ResourceExhausted, ServiceError

CONTEXT_TOKENS = 4096
VOCABULARY = 640
NAN, INF = float("nan"), float("inf")
LIMITS = RequestLimits(
    max_messages=4, max_parts=6, max_text_bytes=1000, max_images=2, max_image_bytes=100, max_tokens=2000,
    max_total_tokens=3000, max_choices=4, max_logit_biases=3, max_stop_token_ids=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def builder(tiny_checkpoint: Path) -> Iterator[PromptBuilder]:
    builder = PromptBuilder.from_checkpoint(tiny_checkpoint)
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def reader(builder: PromptBuilder) -> RequestReader:
    return make_reader(builder)


def make_reader(builder: PromptBuilder, defaults: GenerationDefaults | None = None, **options: Any) -> RequestReader:
    return RequestReader(
        LIMITS,
        defaults or GenerationDefaults(),
        builder,
        eos_ids=frozenset({624}),
        context_tokens=CONTEXT_TOKENS,
        vocab_size=VOCABULARY,
        **options,
    )


def text(content: str) -> common_pb2.Part:
    return common_pb2.Part(text=content)


def image(data: bytes = b"png", label: str = "") -> common_pb2.Part:
    return common_pb2.Part(image=common_pb2.Image(data=data, label=label))


def ids(*token_ids: int) -> common_pb2.Part:
    return common_pb2.Part(token_ids=common_pb2.TokenIds(ids=token_ids))


def completion(*parts: common_pb2.Part, **sampling: Any) -> llm_pb2.GenerateRequest:
    return llm_pb2.GenerateRequest(
        completion=common_pb2.Completion(parts=parts), sampling=common_pb2.SamplingParams(**sampling)
    )


def chat(*turns: tuple[int, list[common_pb2.Part]]) -> llm_pb2.GenerateRequest:
    messages = [common_pb2.Message(role=role, parts=parts) for role, parts in turns]  # type: ignore[arg-type]
    return llm_pb2.GenerateRequest(chat=common_pb2.Chat(messages=messages))


def read(reader: RequestReader, message: llm_pb2.GenerateRequest) -> Request:
    # Over the wire, as the server gets it.
    return reader.read(llm_pb2.GenerateRequest.FromString(message.SerializeToString()), "r1")


def refused(reader: RequestReader, message: llm_pb2.GenerateRequest, kind: type[ServiceError]) -> ServiceError:
    """The error, which names its field, limit and value; the next request still works."""
    with pytest.raises(kind) as raised:
        read(reader, message)
    error = raised.value
    assert error.field is not None and error.field in error.message
    for named in (error.limit, error.value):
        assert named is None or str(named) in error.message
    assert read(reader, completion(text("ok"))).segments
    return error


# Sampling ranges (cases 25, 26, 27)

GOOD: dict[str, list[float]] = {
    "temperature": [0.0, -0.0, 1e-30, 1.0, 2.0],
    "top_p": [1e-6, 0.5, 1.0],
    "top_k": [0, 1, 2**31 - 1],
    "min_p": [0.0, 0.5, 1.0],
    "presence_penalty": [-2.0, 0.0, 2.0],
    "frequency_penalty": [-2.0, 0.0, 2.0],
    "repetition_penalty": [0.001, 1.0, 2.0],
    "n": [1, 2],
    "logprobs": [0, 20],
    "max_tokens": [1, 2000],
}
BAD: dict[str, list[float]] = {
    "temperature": [NAN, INF, -INF, -0.001, 2.001, -1e-30],
    "top_p": [NAN, INF, 0.0, -0.5, 1.001],
    "top_k": [-1, -(2**31)],
    "min_p": [NAN, INF, -0.001, 2.0, 1.001],
    "presence_penalty": [NAN, INF, -INF, -2.001, 2.001],
    "frequency_penalty": [NAN, INF, -INF, -2.001, 2.001],
    "repetition_penalty": [NAN, INF, 0.0, -1.0, 2.001],
    "n": [0, -1],
    "logprobs": [-1, 21, 2**31 - 1],
    "max_tokens": [0, -1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_values_in_range_are_taken(reader: RequestReader, field: str, value: float) -> None:
    sampling = read(reader, completion(text("a"), **{field: value})).sampling
    assert getattr(sampling, field) == pytest.approx(value)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_values_out_of_range_are_refused(reader: RequestReader, field: str, value: float) -> None:
    error = refused(reader, completion(text("a"), **{field: value}), InvalidArgument)
    assert error.field == f"sampling.{field}"
    assert error.limit is not None and error.value == pytest.approx(value, nan_ok=True)


def test_the_reported_nan_and_negative_zero(reader: RequestReader) -> None:
    params = json.loads('{"nan_temperature": NaN, "neg0": -0.0}')
    with pytest.raises(InvalidArgument, match=r"temperature.*nan"):
        read(reader, completion(text("a"), temperature=params["nan_temperature"]))
    assert str(read(reader, completion(text("a"), temperature=params["neg0"])).sampling.temperature) == "0.0"


@pytest.mark.parametrize("temperature", [1e-45, 1e-10, 9.9e-6])
def test_a_temperature_below_the_sampled_range_is_greedy(reader: RequestReader, temperature: float) -> None:
    assert read(reader, completion(text("a"), temperature=temperature)).sampling.greedy


@pytest.mark.parametrize("bias", [NAN, INF, -INF, 100.5, -101.0])
def test_a_bias_out_of_range_is_refused(reader: RequestReader, bias: float) -> None:
    assert (
        refused(reader, completion(text("a"), logit_bias={7: bias}), InvalidArgument).field == "sampling.logit_bias[7]"
    )


@pytest.mark.parametrize("token_id", [-1, VOCABULARY, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(reader: RequestReader, token_id: int) -> None:
    for sampling in ({"logit_bias": {token_id: 1.0}}, {"stop_token_ids": [token_id]}):
        assert refused(reader, completion(text("a"), **sampling), InvalidArgument).value == token_id
    assert refused(reader, completion(ids(token_id)), InvalidArgument).value == token_id


# Cheap fields, dear work (case 34)

TOO_MUCH: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "stop strings": ({"stop": ["x"] * 500_000}, "sampling.stop", 16, 500_000),
    "stop length": ({"stop": ["a", "é" * 513]}, "sampling.stop[1]", 1024, 1026),
    "stop ids": ({"stop_token_ids": [1, 2, 3, 4]}, "sampling.stop_token_ids", 3, 4),
    "biases": ({"logit_bias": dict.fromkeys(range(4), 1.0)}, "sampling.logit_bias", 3, 4),
    "choices": ({"n": 5}, "sampling.n", 4, 5),
    "choices, int32": ({"n": 2**31 - 1}, "sampling.n", 4, 2**31 - 1),
    "tokens": ({"max_tokens": 2001}, "sampling.max_tokens", 2000, 2001),
    "tokens of all choices": ({"max_tokens": 1600, "n": 2}, "sampling.max_tokens", 3000, 3200),
}


@pytest.mark.parametrize(("sampling", "field", "limit", "value"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_too_much_work_is_refused(
    reader: RequestReader, sampling: dict[str, Any], field: str, limit: int, value: int
) -> None:
    error = refused(reader, completion(text("a"), **sampling), ResourceExhausted)
    assert (error.field, error.limit, error.value) == (field, limit, value)


def test_the_default_max_tokens_stays_under_every_cap(reader: RequestReader) -> None:
    assert read(reader, completion(text("a"))).sampling.max_tokens == 2000
    assert read(reader, completion(text("a"), n=4)).sampling.max_tokens == 750


def test_an_empty_stop_string_is_refused(reader: RequestReader) -> None:
    assert refused(reader, completion(text("a"), stop=["x", ""]), InvalidArgument).field == "sampling.stop[1]"


# Defaults of the checkpoint


def test_a_field_that_is_not_set_takes_the_checkpoints_value(builder: PromptBuilder) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    reader = make_reader(builder, GenerationDefaults.from_generation_config(config))
    sampling = read(reader, completion(text("a"))).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    assert (sampling.repetition_penalty, sampling.min_p, sampling.presence_penalty) == (1.05, 0.0, 0.0)
    # Zero is a value, not the absence of one.
    assert read(reader, completion(text("a"), temperature=0.0, top_k=0)).sampling.greedy
    assert read(reader, completion(text("a"), temperature=0.0, top_k=0)).sampling.top_k == 0


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": None}, 0.0),
    ],
)
def test_a_checkpoint_that_does_not_sample_is_greedy(config: dict[str, Any], temperature: float) -> None:
    assert GenerationDefaults.from_generation_config(config).temperature == temperature


def test_a_checkpoints_bad_default_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"generation_config: top_p .*1\.5"):
        GenerationDefaults.from_generation_config({"top_p": 1.5})


def test_the_checkpoints_files_are_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert GenerationDefaults.from_checkpoint(tiny_checkpoint) == GenerationDefaults()
    expected = json.loads((tiny_checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert read_eos_ids(tiny_checkpoint) == frozenset(expected)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert read_eos_ids(tmp_path) == {7}


def test_end_tokens_stop_unless_ignored(reader: RequestReader) -> None:
    assert read(reader, completion(text("a"), stop_token_ids=[3])).sampling.stop_token_ids == {3, 624}
    ignoring = read(reader, completion(text("a"), stop_token_ids=[3], ignore_eos=True)).sampling
    assert ignoring.stop_token_ids == {3} and ignoring.ignore_eos


def test_a_seed_is_kept_or_drawn(reader: RequestReader) -> None:
    assert read(reader, completion(text("a"), seed=2**64 - 1)).sampling.seed == 2**64 - 1
    assert read(reader, completion(text("a"), seed=0)).sampling.seed == 0
    drawn = {read(reader, completion(text("a"))).sampling.seed for _ in range(3)}
    assert len(drawn) == 3 and None not in drawn


# Prompts


def test_parts_keep_their_order_and_images_their_bytes(reader: RequestReader) -> None:
    request = read(
        reader,
        chat(
            (common_pb2.ROLE_SYSTEM, [text("be brief")]),
            (common_pb2.ROLE_USER, [text("first:"), image(b"red", "a"), text("second:"), image(b"blue", "b")]),
        ),
    )
    assert request.images == (ImageInput(0, b"red", "a"), ImageInput(1, b"blue", "b"))
    assert [part.index for part in request.segments if isinstance(part, PromptImage)] == [0, 1]
    assert request.request_id == "r1"


def test_a_completion_keeps_the_order_of_its_parts(reader: RequestReader) -> None:
    request = read(reader, completion(ids(1, 2), image(b"red"), ids(3)))
    kinds = [type(part) for part in request.segments]
    assert kinds == [PromptTokens, PromptImage, PromptTokens]
    assert request.segments[0].ids[:2] == (1, 2) and request.segments[2].ids[-1] == 3  # type: ignore[union-attr]


BAD_PROMPTS: dict[str, tuple[Callable[[], llm_pb2.GenerateRequest], type[ServiceError], str]] = {
    "no input": (llm_pb2.GenerateRequest, InvalidArgument, "input"),
    "no messages": (chat, InvalidArgument, "chat.messages"),
    "no parts in a message": (lambda: chat((2, [])), InvalidArgument, "chat.messages[0].parts"),
    "no role": (lambda: chat((2, [text("a")]), (0, [text("a")])), InvalidArgument, "chat.messages[1].role"),
    "unknown role": (lambda: chat((9, [text("a")])), InvalidArgument, "chat.messages[0].role"),
    "empty part": (lambda: completion(common_pb2.Part()), InvalidArgument, "completion.parts[0]"),
    "no parts": (completion, InvalidArgument, "completion"),
    "empty text": (lambda: completion(text("")), InvalidArgument, "completion"),
    "no ids": (lambda: completion(ids()), InvalidArgument, "completion"),
    "ids in a chat": (lambda: chat((2, [ids(1)])), InvalidArgument, "chat.messages[0].parts"),
    "image without bytes": (lambda: completion(image(b"")), InvalidArgument, "completion.parts[0].image.data"),
    "image without source": (
        lambda: chat((2, [common_pb2.Part(image=common_pb2.Image(label="x"))])),
        InvalidArgument,
        "chat.messages[0].parts[0].image.data",
    ),
    "image by url": (
        lambda: completion(common_pb2.Part(image=common_pb2.Image(url="http://169.254.169.254/"))),
        InvalidArgument,
        "completion.parts[0].image.url",
    ),
    "too many messages": (lambda: chat(*[(2, [text("a")])] * 5), ResourceExhausted, "chat.messages"),
    "too many parts": (lambda: chat(*[(2, [text("a")] * 3)] * 3), ResourceExhausted, "chat.messages[2].parts"),
    "too much text": (
        lambda: completion(text("é" * 300), text("é" * 300)),
        ResourceExhausted,
        "completion.parts[1].text",
    ),
    "too many images": (lambda: completion(*[image()] * 3), ResourceExhausted, "completion.parts[2].image"),
    "too many image bytes": (
        lambda: completion(image(bytes(60)), image(bytes(60))),
        ResourceExhausted,
        "completion.parts[1].image.data",
    ),
    "long label": (lambda: completion(image(label="é" * 513)), ResourceExhausted, "completion.parts[0].image.label"),
    "more ids than context": (lambda: completion(ids(*[1] * 4096)), InvalidArgument, "completion.parts[0].token_ids"),
}


@pytest.mark.parametrize(("make", "kind", "field"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_refused_by_name(
    reader: RequestReader, make: Callable[[], llm_pb2.GenerateRequest], kind: type[ServiceError], field: str
) -> None:
    assert refused(reader, make(), kind).field == field


def test_a_prompt_as_long_as_the_context_is_refused_and_one_shorter_is_taken(builder: PromptBuilder) -> None:
    reader = RequestReader(
        LIMITS, GenerationDefaults(), builder, eos_ids=frozenset(), context_tokens=10, vocab_size=VOCABULARY
    )
    assert read(reader, completion(ids(*[1] * 8), text("a"))).sampling.max_tokens == 9
    error = refused(reader, completion(ids(*[1] * 9), text("a")), InvalidArgument)
    assert (error.reason, error.limit, error.value) == ("CONTEXT_LENGTH", 10, 10)


def test_another_models_name_is_refused(builder: PromptBuilder) -> None:
    reader = make_reader(builder, model="tiny")
    message = completion(text("a"))
    for name in ("", "huge"):
        message.model = name
        with pytest.raises(NotFound, match=re.escape(f"model: {name!r} is not served here, 'tiny' is")):
            read(reader, message)
    message.model = "tiny"
    assert read(reader, message)


# Replies


def test_events_carry_what_they_were_given() -> None:
    assert write_accepted("r1").accepted.request_id == "r1"
    token = SampledToken(5, -0.5, (Logprob(5, -0.5), Logprob(6, -1.5)))
    plain = write_delta(1, "hi", [token]).delta
    assert (plain.choice, plain.text, list(plain.token_ids), len(plain.logprobs)) == (1, "hi", [5], 0)
    (position,) = write_delta(0, "", [token], lambda token_id: bytes([token_id])).delta.logprobs
    assert (position.chosen.token_id, position.chosen.logprob, position.chosen.token_bytes) == (5, -0.5, b"\x05")
    assert [(other.token_id, other.logprob, other.token_bytes) for other in position.top] == [
        (5, -0.5, b"\x05"),
        (6, -1.5, b"\x06"),
    ]
    finished = write_finished(2, FinishReason.STOP, "END").finished
    assert (finished.choice, finished.reason, finished.stop) == (2, common_pb2.FINISH_REASON_STOP, "END")
    assert write_finished(0, FinishReason.LENGTH).finished.reason == common_pb2.FINISH_REASON_LENGTH
    usage = write_usage(prompt_tokens=4, cached_tokens=3, visual_tokens=2, completion_tokens=1).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.visual_tokens, usage.completion_tokens) == (4, 3, 2, 1)


def test_an_aborted_sequence_has_no_finish_event() -> None:
    with pytest.raises(AssertionError):
        write_finished(0, FinishReason.ABORT)
