"""Chooses the next token of each row of logits; knows no sequences, no text and no scheduling.

A row's result depends on that row alone: every sum is taken over one row by itself, in a buffer of its own, so a
request gets the same tokens and log-probabilities alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm_svc.core import Logprob, SampledToken, SamplingParams

# Below this, dividing by the temperature leaves the likeliest token's probability at 1 in float32 anyway.
GREEDY_TEMPERATURE = 1e-5
LOWEST_LOGPROB = -9999.0


class NonFiniteLogits(Exception):
    """A row's logits have a NaN, an infinity, or nothing but -inf: the model is broken, which must not be hidden."""

    def __init__(self, row: int, detail: str) -> None:
        super().__init__(f"the logits of row {row} {detail}")
        self.row = row


def new_generator(seed: int, choice: int = 0) -> torch.Generator:
    """The random numbers of one choice of a request: a CPU generator seeded with `seed + choice` (mod 2**64)."""
    seed = (seed + choice) % 2**64
    # torch's CPU engine keeps only 32 bits of a seed; fold the upper half in so that it counts too.
    folded = (seed ^ (seed >> 32) * 0x9E3779B1) % 2**32
    return torch.Generator().manual_seed(folded)


class SamplingRow:
    """What the sampler keeps of one sequence from step to step. Keep one per sequence.

    `output_ids` is the sequence's own growing list: new ids are counted when the row is sampled next, so the cost of a
    step does not grow with the length. `generator` is needed unless the row is greedy.
    """

    def __init__(
        self,
        params: SamplingParams,
        generator: torch.Generator | None,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        self.params = params
        self.generator = generator
        self.prompt_ids = prompt_ids
        self.output_ids = output_ids
        self.greedy = params.temperature < GREEDY_TEMPERATURE
        assert self.greedy or generator is not None, "a sampled row needs a generator"
        self._repetition = params.repetition_penalty != 1.0
        self._occurrence = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.changes_logits = self._repetition or self._occurrence or bool(params.logit_bias)
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._counted = 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the row needs nothing but the place of its highest logit."""
        return self.greedy and not self.changes_logits and self.params.logprobs is None

    def adjust(self, logits: torch.Tensor) -> None:
        """Applies bias and penalties in place. `logits` is float32 [V].

        Repetition divides positive and multiplies negative logits of every token of prompt and answer (transformers'
        RepetitionPenaltyLogitsProcessor); presence and frequency count the answer only (vLLM's apply_penalties).
        """
        params = self.params
        if params.logit_bias:
            if self._bias is None:
                ids, values = zip(*params.logit_bias, strict=True)
                self._bias = (
                    torch.tensor(ids, dtype=torch.int64, device=logits.device),
                    torch.tensor(values, dtype=torch.float32, device=logits.device),
                )
            logits.index_add_(0, *self._bias)
        if self._repetition or self._occurrence:
            self._count(logits)
        if self._seen is not None:
            penalty = params.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            torch.where(self._seen, penalised, logits, out=logits)
        if self._counts is not None:
            logits -= params.frequency_penalty * self._counts
            logits -= params.presence_penalty * (self._counts > 0)

    def _count(self, logits: torch.Tensor) -> None:
        new_ids = list(self.output_ids[self._counted :])
        first = self._seen is None and self._counts is None
        if first:
            if self._repetition:
                self._seen = torch.zeros_like(logits, dtype=torch.bool)
            if self._occurrence:
                self._counts = torch.zeros_like(logits)
        assert self._counted <= len(self.output_ids), "a sequence's output never shrinks"
        self._counted = len(self.output_ids)
        added = torch.tensor(new_ids, dtype=torch.int64, device=logits.device)
        if self._seen is not None:
            if first:
                self._seen[torch.tensor(list(self.prompt_ids), dtype=torch.int64, device=logits.device)] = True
            self._seen[added] = True
        if self._counts is not None:
            self._counts.index_add_(0, added, torch.ones_like(added, dtype=torch.float32))


class Sampler:
    """Samples for a model of `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | NonFiniteLogits]:
        """One token per row. `logits` is float32 [B, V] and stays as it is; `rows` has B entries.

        A row that cannot be sampled gives a NonFiniteLogits in its place, the others are not touched by it. Logits of
        -inf are masked tokens.
        """
        assert logits.dtype == torch.float32 and logits.shape == (len(rows), self.vocab_size), logits.shape
        if not rows:
            return []
        # One pass finds the greedy choice (the first of equals) and every broken row: a NaN wins every maximum.
        highest, likeliest = logits.max(dim=-1)
        results: list[SampledToken | NonFiniteLogits] = []
        for index, (top, token_id) in enumerate(zip(highest.tolist(), likeliest.tolist(), strict=True)):
            if not -float("inf") < top < float("inf"):
                results.append(NonFiniteLogits(index, f"have a highest value of {top}"))
            elif rows[index].plain_greedy:
                results.append(SampledToken(token_id))
            else:
                results.append(_sample_row(logits[index], rows[index], index))
        return results


def _sample_row(row_logits: torch.Tensor, row: SamplingRow, index: int) -> SampledToken | NonFiniteLogits:
    # A copy, because the row is changed, and because its own buffer has the same alignment wherever the row stood.
    logits = row_logits.clone()
    logprobs = torch.log_softmax(logits, dim=-1) if row.params.logprobs is not None else None
    if row.changes_logits:
        row.adjust(logits)
    highest = logits.max(dim=-1)
    if not torch.isfinite(highest.values):
        return NonFiniteLogits(index, f"have a highest value of {float(highest.values)} after bias and penalties")
    token_id = int(highest.indices) if row.greedy else _draw(logits, row)
    if logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, _clamped(logprobs[token_id]), _top(logprobs, row.params.logprobs or 0))


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    params = row.params
    # Nothing above zero is divided, so the least temperature cannot overflow.
    scaled = (logits - logits.max()) / params.temperature
    if 0 < params.top_k < len(scaled):
        # Ties with the k-th stay, as in transformers' TopKLogitsWarper.
        scaled = scaled.masked_fill(scaled < torch.topk(scaled, params.top_k).values[-1], -float("inf"))
    candidates = torch.nonzero(scaled > -float("inf")).squeeze(-1)
    probs = torch.softmax(scaled[candidates], dim=-1)
    if params.top_p < 1.0:
        order = torch.sort(probs, descending=True, stable=True)
        mass_before = order.values.double().cumsum(0) - order.values.double()
        # The first always stays: the mass before it is zero and top_p is above zero.
        kept = torch.zeros_like(probs, dtype=torch.bool)
        kept[order.indices[mass_before < params.top_p]] = True
        candidates, probs = candidates[kept], probs[kept]
    if params.min_p > 0.0:
        kept = probs >= params.min_p * probs.max()
        candidates, probs = candidates[kept], probs[kept]
    assert row.generator is not None
    cumulative = probs.double().cumsum(0)
    draw = torch.rand((), generator=row.generator, dtype=torch.float64).item() * cumulative[-1].item()
    # `<=`: a candidate of probability zero is never drawn, not even by a draw of exactly zero.
    place = int((cumulative <= draw).sum())
    return int(candidates[min(place, len(candidates) - 1)])


def _top(logprobs: torch.Tensor, count: int) -> tuple[Logprob, ...]:
    """The `count` likeliest tokens, best first, the lower id first among equals."""
    count = min(count, len(logprobs))
    if count == 0:
        return ()
    least = torch.topk(logprobs, count).values[-1]
    ids = torch.nonzero(logprobs >= least).squeeze(-1)
    order = torch.sort(logprobs[ids], descending=True, stable=True).indices[:count]
    return tuple(Logprob(int(ids[place]), _clamped(logprobs[ids[place]])) for place in order)


def _clamped(logprob: torch.Tensor) -> float:
    return max(float(logprob), LOWEST_LOGPROB)
