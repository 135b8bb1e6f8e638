"""The native tier against unmodified transformers: the same logits and the same tokens, however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llm_svc.core import (
    ImageSpan,
    Prompt,
    PromptTokens,
    Request,
    SamplingParams,
    Sequence,
    VisualTokens,
)
from llm_svc.settings import LlmSettings
from protos.llm.v1 import llm_pb2
from tests.llm_svc.checkpoints import load
from tests.llm_svc.conftest import Sample, Upstream
from tests.loopback import Answer, LlmOnLoopback, completion, ids_part, image_part

NEW_TOKENS = 64
LOGIT_TOLERANCE = 2e-4


def request_of(sample: Sample, **sampling: object) -> llm_pb2.GenerateRequest:
    parts = [image_part(part) if isinstance(part, bytes) else ids_part(part) for part in sample.parts]
    return completion(*parts, max_tokens=NEW_TOKENS, ignore_eos=True, **sampling)


def wrong(upstream: Upstream, samples: list[Sample], answers: list[Answer]) -> list[str]:
    """Names of the samples whose tokens differ from upstream's."""
    assert len(answers) == len(samples)
    return [s.name for s, a in zip(samples, answers, strict=True) if a.ids[0] != upstream.generate(s)]


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path) -> Iterator[LlmOnLoopback]:
    """Prompts in one piece; nothing is reused."""
    with LlmOnLoopback(tiny_checkpoint, prefill_chunk_tokens=0, prefix_cache=False) as service:
        yield service


def test_logits_of_every_step_equal_upstream(tiny_checkpoint: Path, upstream: Upstream, samples: list[Sample]) -> None:
    model = load(LlmSettings(model=str(tiny_checkpoint), block_size=16, vision_target="unused:1"))
    worst = {}
    for sample in samples:
        inputs = upstream.inputs(sample)
        ids = inputs["input_ids"][0].tolist()
        answer = upstream.generate(sample, NEW_TOKENS)
        with torch.inference_mode():
            full = inputs | {"input_ids": torch.tensor([ids + answer])}
            expected = upstream.model(**full).logits[0, len(ids) - 1 : -1]
        sequence = Sequence(
            Request("r", (PromptTokens(tuple(ids)),), (), SamplingParams(max_tokens=NEW_TOKENS)),
            Prompt(tuple(ids), spans(upstream, sample, ids)),
        )
        model.scheduler.add(sequence)
        steps = []
        while len(steps) < NEW_TOKENS:
            batch = model.scheduler.schedule()
            logits = model.runner.run(batch)
            model.scheduler.finish(batch)
            for row in logits:
                sequence.output_ids.append(answer[len(steps)])
                steps.append(row)
        model.scheduler.remove(sequence)
        worst[sample.name] = float((torch.stack(steps) - expected).abs().max())
    assert max(worst.values()) < LOGIT_TOLERANCE, worst


def spans(upstream: Upstream, sample: Sample, ids: list[int]) -> tuple[ImageSpan, ...]:
    """Where the placeholders lie, with upstream's own visual tokens."""
    inputs = upstream.inputs(sample)
    if "pixel_values" not in inputs:
        return ()
    with torch.inference_mode():
        features = upstream.model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        ).pooler_output
    places = np.flatnonzero(np.array(ids) == upstream.config.image_token_id)
    found, offset = [], 0
    for index, rows in enumerate(features):
        found.append(ImageSpan(int(places[offset]), VisualTokens(bytes([index]) * 32, len(rows), rows.numpy())))
        offset += len(rows)
    return tuple(found)


def test_tokens_equal_upstream_one_at_a_time(whole: LlmOnLoopback, upstream: Upstream, samples: list[Sample]) -> None:
    answers = [whole.ask(request_of(sample)) for sample in samples]
    assert wrong(upstream, samples, answers) == []
    by_name = {sample.name: answer.ids[0] for sample, answer in zip(samples, answers, strict=True)}
    assert by_name["two-images"] != by_name["two-images-swapped"], "the pictures' order must matter"


@pytest.mark.parametrize("chunk", [16, 64, 100])
def test_tokens_equal_upstream_in_chunks(
    tiny_checkpoint: Path, upstream: Upstream, samples: list[Sample], chunk: int
) -> None:
    with LlmOnLoopback(tiny_checkpoint, prefill_chunk_tokens=chunk, prefix_cache=False) as service:
        assert wrong(upstream, samples, service.ask_all([request_of(sample) for sample in samples])) == []


def test_tokens_equal_upstream_on_a_prefix_hit(
    tiny_checkpoint: Path, upstream: Upstream, samples: list[Sample]
) -> None:
    with LlmOnLoopback(tiny_checkpoint, max_snapshots=256) as service:
        cold = service.ask_all([request_of(sample) for sample in samples])
        warm = service.ask_all([request_of(sample) for sample in samples])
    assert wrong(upstream, samples, cold) == []
    assert wrong(upstream, samples, warm) == []
    for sample, answer in zip(samples, warm, strict=True):
        assert answer.usage is not None
        last_boundary = (answer.usage.prompt_tokens - 1) // 16 * 16
        assert answer.usage.cached_tokens == last_boundary, sample.name


def test_tokens_equal_upstream_when_a_prefix_is_shared_with_another_tail(
    tiny_checkpoint: Path, upstream: Upstream, samples: list[Sample]
) -> None:
    by_name = {sample.name: sample for sample in samples}
    first = by_name["image-far-away"]
    head, image, tail = first.parts
    assert isinstance(tail, list)
    other = Sample("image-far-away-other-tail", (head, image, tail[:200] + [5, 6, 7] * 9))
    edited = Sample("image-far-away-edited", (head, image, [*tail[:100], 3, *tail[101:]]))
    with LlmOnLoopback(tiny_checkpoint, prefill_chunk_tokens=64) as service:
        service.ask(request_of(first))
        answers = [service.ask(request_of(sample)) for sample in (other, edited)]
    assert wrong(upstream, [other, edited], answers) == []
    assert all(answer.usage is not None and answer.usage.cached_tokens > 64 for answer in answers)


def test_tokens_equal_upstream_after_preemption(
    tiny_checkpoint: Path, upstream: Upstream, samples: list[Sample]
) -> None:
    longest = max(len(upstream.inputs(sample)["input_ids"][0]) for sample in samples) + NEW_TOKENS
    with LlmOnLoopback(tiny_checkpoint, cache_tokens=(longest // 16 + 3) * 16, prefill_chunk_tokens=64) as service:
        answers = service.ask_all([request_of(sample) for sample in samples])
        assert service.metric("day0_num_preemptions_total") > 0, "the pool was large enough for all"
        service.wait_idle()
    assert wrong(upstream, samples, answers) == []


def test_bits_are_the_same_alone_and_among_others(whole: LlmOnLoopback, samples: list[Sample]) -> None:
    """Log-probabilities as well as tokens, greedy and sampled: nothing of a request depends on its neighbours."""
    kinds = ({"logprobs": 5}, {"logprobs": 5, "temperature": 1.0, "seed": 42})
    for kind in kinds:
        alone = [whole.ask(request_of(sample, **kind)) for sample in samples[8:16]]
        together = whole.ask_all([request_of(sample, **kind) for sample in samples[8:16]])
        for sample, one, other in zip(samples[8:16], alone, together, strict=True):
            assert one.ids == other.ids, sample.name
            assert one.logprobs == other.logprobs, sample.name
