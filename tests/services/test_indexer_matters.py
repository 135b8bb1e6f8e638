"""The embedded model's indexer tells positions apart, and without it the needles of the needle test are missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from day0.embedded import embedded_model
from day0_kernels.index_select import reference
from tests.loopback import Answer, LlmOnLoopback, chat, text_part
from tests.services.needles import Haystack, Needle

pytestmark = pytest.mark.slow
TOKENS = 2047
Scores = Callable[..., torch.Tensor]


def ask(needles: list[Needle]) -> list[Answer]:
    with LlmOnLoopback(embedded_model(), images=False, block_size=64) as service:
        return service.ask_all([chat(text_part(each.text), temperature=0, max_tokens=24) for each in needles])


def test_scores_differ_between_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    true_scores, seen = reference.pool_scores, []

    def recorded(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        scores = true_scores(q, weights, keys, scale)
        if keys.shape[1] * 4 >= TOKENS:
            seen.append(scores[-1, : TOKENS // 4].clone())
        return scores

    monkeypatch.setattr(reference, "pool_scores", recorded)
    needle = Haystack().needle(TOKENS, 0.5)
    (answer,) = ask([needle])
    assert answer.text[0].strip() == needle.answer
    assert len(seen) >= 4, "two layers, prompt and decode"
    for scores in seen:
        assert len(scores.unique()) > len(scores) / 2
        assert scores.std() > 0.05 * scores.abs().max()


def constant(true: Scores) -> Scores:
    return lambda *inputs: torch.zeros_like(true(*inputs))


def random(true: Scores) -> Scores:
    generator = torch.Generator().manual_seed(0)
    return lambda *inputs: torch.rand(true(*inputs).shape, generator=generator)


@pytest.mark.parametrize("fake", [constant, random])
def test_without_its_scores_needles_are_missed(monkeypatch: pytest.MonkeyPatch, fake: Callable) -> None:
    haystack = Haystack()
    needles = [haystack.needle(TOKENS, depth) for depth in (0.3, 0.5, 0.6, 0.7)]
    monkeypatch.setattr(reference, "pool_scores", fake(reference.pool_scores))
    answers = ask(needles)
    right = sum(answer.text[0].strip() == needle.answer for answer, needle in zip(answers, needles, strict=True))
    assert right <= 1
