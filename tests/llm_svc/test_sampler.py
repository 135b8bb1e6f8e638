"""Choosing tokens: order of the filters, upstream's arithmetic, broken rows, seeds, and independence of neighbours."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm_svc.core import SampledToken, SamplingParams
from llm_svc.sampler import NonFiniteLogits, Sampler, SamplingRow, new_generator

VOCABULARY = 300
NAN, INF = float("nan"), float("inf")


def row(
    *, prompt: list[int] | None = None, output: list[int] | None = None, seed: int = 42, **params: Any
) -> SamplingRow:
    return SamplingRow(
        SamplingParams(max_tokens=8, **params), new_generator(seed), prompt or [], [] if output is None else output
    )


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def choose(logits: torch.Tensor, *rows: SamplingRow) -> list[SampledToken]:
    tokens = Sampler(logits.shape[-1]).sample(logits, rows)
    assert all(isinstance(token, SampledToken) for token in tokens), tokens
    return [token for token in tokens if isinstance(token, SampledToken)]


def drawn(logits: list[float], count: int = 200, **params: Any) -> set[int]:
    """Every token that came up in `count` draws."""
    sampled = row(**params)
    return {choose(torch.tensor([logits]), sampled)[0].token_id for _ in range(count)}


# Greedy


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals() -> None:
    assert choose(torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]]), row(), row()) == [SampledToken(1), SampledToken(0)]
    ties = torch.zeros(1, 100_000)
    assert choose(ties, row())[0].token_id == 0
    assert choose(ties, row(logprobs=0))[0].token_id == 0


def test_the_given_logits_stay_as_they_are() -> None:
    logits = random_logits(2)
    before = logits.clone()
    choose(logits, row(logit_bias=((1, 5.0),), repetition_penalty=1.5, prompt=[2]), row(temperature=1.0, top_k=3))
    assert torch.equal(logits, before)


# Very small temperatures (case 26)


@pytest.mark.parametrize("temperature", [1e-45, 1e-10, 9e-6])
def test_temperatures_below_the_limit_are_greedy(temperature: float) -> None:
    assert drawn([0.0, 1e-6, 0.0], temperature=temperature) == {1}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_very_small_temperatures_do_not_overflow(temperature: float) -> None:
    assert drawn([3e38, -3e38, 2e38, 0.0], temperature=temperature) == {0}
    assert drawn([-3e38, -2e38, -INF, -3e38], temperature=temperature, top_p=0.5, min_p=0.5, top_k=3) == {1}


# Filters and penalties, against transformers


def test_filters_keep_what_upstream_keeps() -> None:
    logits = random_logits(1)
    ids = torch.zeros(1, 1, dtype=torch.long)
    for params in ({"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}):
        scores = TemperatureLogitsWarper(0.8)(ids, logits)
        if "top_k" in params:
            scores = TopKLogitsWarper(int(params["top_k"]))(ids, scores)
        if "top_p" in params:
            scores = TopPLogitsWarper(params["top_p"])(ids, scores)
        if "min_p" in params:
            scores = MinPLogitsWarper(params["min_p"])(ids, scores)
        kept = set(torch.nonzero(scores[0] > -INF).squeeze(-1).tolist())
        counted = Counter(choose(logits, row(temperature=0.8, seed=seed, **params))[0].token_id for seed in range(1500))
        assert set(counted) <= kept, params
        probs = torch.softmax(scores[0], dim=-1)
        for token_id in kept:
            expected = float(probs[token_id])
            error = 5 * math.sqrt(expected * (1 - expected) / 1500) + 1e-3
            assert abs(counted[token_id] / 1500 - expected) < error, (params, token_id)


def test_top_k_keeps_ties_and_larger_than_the_vocabulary_keeps_all() -> None:
    assert drawn([1.0, 2.0, 1.0, 0.0], temperature=1.0, top_k=2) == {0, 1, 2}
    assert drawn([1.0, 1.0, 1.0], temperature=1.0, top_k=50) == {0, 1, 2}


def test_top_p_always_keeps_the_likeliest() -> None:
    assert drawn([5.0, 0.0, 0.0], temperature=1.0, top_p=1e-6) == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert drawn([1.0, 1.0, 1.0, 0.9, -1.0], temperature=1.0, min_p=0.5) == {0, 1, 2, 3}


def test_a_probability_of_zero_is_not_drawn_by_a_draw_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros((), dtype=torch.float64))
    assert drawn([-500.0, 0.0], count=1, temperature=1.0) == {1}


def test_repetition_penalty_is_upstreams_over_prompt_and_answer() -> None:
    logits = random_logits(1)
    prompt, output = [5, 6, 7, 5], [8, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    adjusted = logits[0].clone()
    row(repetition_penalty=1.7, prompt=prompt, output=output).adjust(adjusted)
    assert torch.equal(adjusted, expected[0])


def test_presence_and_frequency_count_the_answer_only() -> None:
    adjusted = torch.zeros(6)
    row(presence_penalty=0.5, frequency_penalty=0.25, prompt=[0, 1], output=[2, 3, 3, 3]).adjust(adjusted)
    assert adjusted.tolist() == [0.0, 0.0, -0.75, -1.25, 0.0, 0.0]


def test_penalties_follow_the_growing_answer() -> None:
    output: list[int] = []
    kept = row(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, prompt=[1], output=output)
    for step in range(6):
        logits = random_logits(1, seed=step)[0]
        fresh = row(
            repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, prompt=[1], output=list(output)
        )
        once, again = logits.clone(), logits.clone()
        kept.adjust(once)
        fresh.adjust(again)
        assert torch.equal(once, again)
        output += [step, step % 2]


def test_bias_comes_before_the_repetition_penalty() -> None:
    adjusted = torch.tensor([1.0, 1.0])
    row(logit_bias=((0, 3.0), (1, -3.0)), repetition_penalty=2.0, prompt=[0, 1]).adjust(adjusted)
    assert adjusted.tolist() == [2.0, -4.0]


def test_a_bias_can_force_and_forbid_a_token() -> None:
    assert drawn([0.0, 9.0, 0.0], temperature=1.0, logit_bias=((2, 100.0),)) == {2}
    assert drawn([0.0, 9.0, 0.0], temperature=1.0, logit_bias=((1, -100.0),)) == {0, 2}


# Log-probabilities (case 29)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits(1)
    (token,) = choose(logits, row(temperature=0.3, top_k=2, logit_bias=((4, 50.0),), logprobs=4))
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert token.token_id == 4
    assert token.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    best = torch.sort(expected, descending=True)
    assert [other.token_id for other in token.top] == best.indices[:4].tolist()
    assert [other.logprob for other in token.top] == pytest.approx(best.values[:4].tolist(), abs=1e-5)


def test_equal_logprobs_come_in_order_of_ids() -> None:
    (token,) = choose(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), row(logprobs=4))
    assert [other.token_id for other in token.top] == [1, 3, 0, 2]


def test_zero_logprobs_give_the_chosen_tokens_alone_and_none_gives_none() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    with_zero, without = choose(logits, row(logprobs=0), row())
    assert with_zero.logprob == pytest.approx(math.log(0.5)) and with_zero.top == ()
    assert without == SampledToken(0)


def test_masked_tokens_have_a_finite_logprob() -> None:
    (token,) = choose(torch.tensor([[0.0, -INF, -INF]]), row(logprobs=3))
    assert [other.logprob for other in token.top] == [0.0, -9999.0, -9999.0]


def test_a_masked_token_is_never_drawn() -> None:
    assert drawn([0.0, -INF, 0.0, -INF], temperature=2.0) == {0, 2}


@pytest.mark.parametrize("broken", [[NAN, 1.0, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF], [1.0, 2.0, NAN]])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"presence_penalty": 1.0}])
def test_a_broken_row_fails_alone(broken: list[float], params: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], broken, [5.0, 1.0, 0.0]])
    first, failed, last = Sampler(3).sample(logits, [row(), row(**params), row()])
    assert (first, last) == (SampledToken(1), SampledToken(0))
    assert isinstance(failed, NonFiniteLogits) and failed.row == 1


# Seeds and neighbours (case 30)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with logprobs": {"logprobs": 5},
    "seed 42": {"temperature": 1.0, "logprobs": 5},
    "all filters": {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "logprobs": 1},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_row_is_bit_equal_alone_and_among_seven_others(params: dict[str, Any], place: int) -> None:
    alone_output: list[int] = []
    among_output: list[int] = []
    alone = row(prompt=[1, 2, 3], output=alone_output, **params)
    among = row(prompt=[1, 2, 3], output=among_output, **params)
    others = [row(seed=seed, **kind) for seed, kind in zip(range(7), [*KINDS.values()] * 2, strict=False)]
    rows = [*others[:place], among, *others[place:]]
    for step in range(12):
        own = random_logits(1, seed=step)
        batch = random_logits(8, seed=1000 + step)
        batch[place] = own[0]
        (expected,) = choose(own, alone)
        token = choose(batch, *rows)[place]
        assert token == expected
        alone_output.append(expected.token_id)
        among_output.append(token.token_id)


def test_a_seed_repeats_and_choices_differ() -> None:
    logits = random_logits(1, scale=0.5)

    def draws(seed: int, choice: int) -> list[int]:
        sampled = SamplingRow(SamplingParams(max_tokens=1, temperature=1.0), new_generator(seed, choice), [], [])
        return [choose(logits, sampled)[0].token_id for _ in range(20)]

    assert draws(42, 0) == draws(42, 0)
    assert draws(42, 1) == draws(43, 0) != draws(42, 0)
    assert draws(2**64 - 1, 1) == draws(0, 0)
    assert draws(2**32, 0) != draws(0, 0), "the upper half of a seed counts"
    assert draws(2**63 + 5, 0) != draws(5, 0)


def test_draws_of_one_request_do_not_move_the_global_generator() -> None:
    state = torch.get_rng_state()
    drawn([0.0, 0.0], temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(3).sample(torch.empty(0, 3), []) == []
