"""Decode steps in buckets: the bits of steps of any size, caches that padding leaves alone, and what is not taken.

Capturing a step as a CUDA graph is all that a GPU adds; `tests/gpu` has it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_svc import decode_buckets
from llm_svc.core import Batch, Prompt, PromptTokens, Request, SamplingParams, Scheduled, Sequence
from llm_svc.decode_buckets import Bucket, Buckets
from llm_svc.decode_rows import DecodeRows
from llm_svc.decode_steps import DecodeSteps
from llm_svc.loading import LoadedModel
from llm_svc.native_runner import NativeRunner
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tests.llm_svc.stepping import step_all

BLOCK = 16


def test_the_smallest_bucket_that_holds_a_batch() -> None:
    buckets = Buckets(20, 1000, block_size=64)
    assert buckets.rows == (1, 2, 4, 8, 16, 20)
    assert buckets.blocks == (64, 256, 1000)
    assert buckets.smallest(1, 1) == Bucket(1, 64)
    assert buckets.smallest(8, 64) == Bucket(8, 64)
    assert buckets.smallest(9, 65) == Bucket(16, 256)
    assert buckets.smallest(20, 1000) == Bucket(20, 1000)
    assert buckets.smallest(21, 1) is None and buckets.smallest(1, 1001) is None


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (1, 63), (2, 64), (3, 65), (512, 64), (513, 20000)])
def test_the_bounds_are_sizes_and_the_largest_comes_first(rows: int, blocks: int) -> None:
    buckets = Buckets(rows, blocks, block_size=64)
    made = list(buckets)
    assert made[0] == Bucket(rows, blocks) == buckets.smallest(rows, blocks)
    assert len(made) == len(set(made)) == len(buckets.rows) * len(buckets.blocks)
    assert list(buckets.rows) == sorted(set(buckets.rows)) and list(buckets.blocks) == sorted(set(buckets.blocks))


def settings(checkpoint: Path, **changes: Any) -> LlmSettings:
    return LlmSettings(model=str(checkpoint), block_size=BLOCK, **changes)


def in_buckets(model: LoadedModel, rows: int, blocks: int) -> LoadedModel:
    """The same model and pools with decode steps in buckets, launched from Python."""
    assert isinstance(model.runner, NativeRunner)
    steps = DecodeSteps(model.runner.model, Buckets(rows, blocks, BLOCK), model.facts.vocab_size)
    return replace(model, runner=NativeRunner(model.runner.model, model.facts, steps))


def prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("packed", [False, True])
def test_every_logit_has_the_bits_of_steps_of_any_size(
    packed: bool, tiny_checkpoint: Path, packed_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end one after the other, tables outgrow their bucket, and memory is short enough to preempt."""
    monkeypatch.setattr(decode_buckets, "NARROWEST_TABLE_TOKENS", 2 * BLOCK)
    model = load(
        settings(packed_checkpoint if packed else tiny_checkpoint, cache_tokens=20 * BLOCK, max_running_sequences=7)
    )
    given = prompts(model.facts.vocab_size, 1, 15, 16, 17, 63, 65, 130)
    answers = [3, 40, 20, 33, 5, 12, 40]
    plain = step_all(model, given, answers)
    bucketed = in_buckets(model, 7, 20)
    preempted = []
    preempt = model.scheduler._preempt
    monkeypatch.setattr(model.scheduler, "_preempt", lambda sequence: [preempted.append(sequence), preempt(sequence)])
    found = step_all(bucketed, given, answers)
    for number, (ours, expected) in enumerate(zip(found, plain, strict=True)):
        assert torch.equal(ours, expected), f"prompt {number}"
    assert preempted, "memory was not short"


def caches(model: LoadedModel) -> list[torch.Tensor]:
    assert isinstance(model.runner, NativeRunner)
    found = [getattr(layer, field.name) for layer in model.runner.model.layers for field in fields(layer)]
    return [tensor for tensor in found if tensor is not None]


def test_a_step_of_padding_changes_no_cache_and_reads_no_expert(packed_checkpoint: Path) -> None:
    model = load(settings(packed_checkpoint, cache_tokens=8 * BLOCK, max_running_sequences=4))
    runner = model.runner
    assert isinstance(runner, NativeRunner)
    routed: list[torch.Tensor] = []
    permute = runner.model.operators.permute_rows

    def seen(*args: Any, **kwargs: Any) -> Any:
        rows, offsets, places = permute(*args, **kwargs)
        routed.append(offsets)
        return rows, offsets, places

    native = replace(runner.model, operators=replace(runner.model.operators, permute_rows=seen))
    steps = DecodeSteps(native, Buckets(4, 8, BLOCK), model.facts.vocab_size)
    for tensor in caches(model):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in caches(model)]
    sequence = running(model, [5, 6, 7])
    batch = Batch((Scheduled(sequence, 3, 1, samples=True),))
    with torch.inference_mode():
        steps._rows.clear(Bucket(4, 8))
        steps._forward(Bucket(4, 8))
    assert routed and all(int(offsets[-1]) == 0 for offsets in routed)
    assert all(torch.equal(now, then) for now, then in zip(caches(model), before, strict=True))
    assert torch.isfinite(steps._logits).all()

    routed.clear()
    assert steps.run(batch, Bucket(4, 8)).shape == (1, model.facts.vocab_size)
    top_k = 2
    assert all(int(offsets[-1]) % top_k == 0 and 0 < int(offsets[-1]) < 4 * top_k for offsets in routed)
    changed = [not torch.equal(now, then) for now, then in zip(caches(model), before, strict=True)]
    assert any(changed), "the live row does change its own"


def running(model: LoadedModel, ids: list[int]) -> Sequence:
    """A sequence whose newest token is still to be computed."""
    sequence = Sequence(
        Request("r", (PromptTokens(tuple(ids)),), (), SamplingParams(max_tokens=99)), Prompt(tuple(ids))
    )
    sequence.output_ids.append(9)
    sequence.blocks, sequence.state_slot = [2], 3
    return sequence


def test_batches_with_a_prefill_or_beyond_the_buckets_are_not_taken(tiny_checkpoint: Path) -> None:
    model = load(settings(tiny_checkpoint, cache_tokens=8 * BLOCK, max_running_sequences=4))
    assert isinstance(model.runner, NativeRunner)
    steps = DecodeSteps(model.runner.model, Buckets(2, 2, BLOCK), model.facts.vocab_size)
    decode = Scheduled(running(model, [1, 2]), 2, 1, samples=True)
    prefill = Scheduled(Sequence(decode.sequence.request, decode.sequence.prompt), 0, 2, samples=True)
    assert steps.bucket_of(Batch((decode, decode))) == Bucket(2, 2)
    assert steps.bucket_of(Batch((decode, prefill))) is None
    assert steps.bucket_of(Batch((decode, decode, decode))) is None
    long = running(model, [1, 2])
    long.blocks = [0, 1, 2]
    assert steps.bucket_of(Batch((Scheduled(long, 2, 1, samples=True),))) is None


class Table:
    """Rows as a device has them, against what a fresh table would have."""

    def __init__(self) -> None:
        self.rows = DecodeRows(4, 8, BLOCK, torch.device("cpu"))

    def step(self, bucket: Bucket, *blocks: list[int]) -> None:
        items = []
        for number, held in enumerate(blocks):
            sequence = Sequence(Request("r", (), (), SamplingParams(max_tokens=99)), Prompt((1,)))
            sequence.output_ids = [7 + number] * (len(held) * BLOCK)
            sequence.blocks, sequence.state_slot = held, number
            items.append(Scheduled(sequence, len(held) * BLOCK - 1, 1, samples=True))
        self.rows.fill(items, bucket)
        expected = torch.full((bucket.rows, bucket.blocks), -1, dtype=torch.int32)
        for row, held in enumerate(blocks):
            expected[row, : len(held)] = torch.tensor(held)
        assert torch.equal(self.rows.block_table(bucket), expected)
        count, pad = len(blocks), bucket.rows - len(blocks)
        assert self.rows.lengths(bucket).tolist() == [len(held) * BLOCK for held in blocks] + [0] * pad
        assert self.rows.slots(bucket).tolist() == [held[-1] * BLOCK + BLOCK - 1 for held in blocks] + [-1] * pad
        assert self.rows.state_slots(bucket).tolist() == [*range(count)] + [-1] * pad
        assert self.rows.ids(bucket).tolist() == [7 + number for number in range(count)] + [0] * pad


def test_tables_follow_their_sequences() -> None:
    table, a, b, c = Table(), [0], [5, 6], [3]
    table.step(Bucket(2, 2), a, b)
    a.append(1)
    table.step(Bucket(2, 2), a, b)
    table.step(Bucket(2, 2), b)
    table.step(Bucket(4, 2), b, a, c)
    # Preempted and back with other blocks, as many as before: another list.
    table.step(Bucket(4, 2), b, [7, 2], c)
    b += [4, 0]
    table.step(Bucket(2, 8), b, a)
    table.step(Bucket(1, 2), a)
    # The second row is new to this width: what it held at another width must not come back.
    table.step(Bucket(1, 8), b)
    table.step(Bucket(2, 8), b)
    table.step(Bucket(4, 2), a, c)
    table.step(Bucket(4, 2))
    table.step(Bucket(1, 2), c)
    table.step(Bucket(4, 2), c, a, [6, 1])
