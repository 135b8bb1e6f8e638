"""Scheduling: simulated caches prove that every forward reads what its own sequence wrote."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_svc.cache.block_pool import BlockPool
from llm_svc.cache.state_slots import Snapshots, StateSlots
from llm_svc.core import (
    Batch,
    ImageSpan,
    Prompt,
    PromptTokens,
    Request,
    SamplingParams,
    Sequence,
    SequenceStatus,
    VisualTokens,
)
from llm_svc.scheduler import Scheduler, SchedulerLimits

BLOCK = 4


def make_scheduler(
    blocks: int = 32, *, batch: int = 64, chunk: int = 16, running: int = 8, snapshots: int = 8, prefix: bool = True
) -> Scheduler:
    limits = SchedulerLimits(batch, chunk, running, prefix)
    return Scheduler(limits, BlockPool(blocks, BLOCK), StateSlots(running), Snapshots(snapshots))


def make_sequence(ids: list[int], new_tokens: int = 4, name: str = "r", images: tuple[ImageSpan, ...] = ()) -> Sequence:
    request = Request(name, (PromptTokens(tuple(ids)),), (), SamplingParams(max_tokens=new_tokens))
    return Sequence(request, Prompt(tuple(ids), images))


class SimulatedCaches:
    """Stands for the tensors: each slot keeps the token written to it, each state all tokens that went through it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, int] = {}
        self.states: dict[int, list[int]] = {}
        self.saved: dict[int, list[int]] = {}
        self.forwards = 0

    def run(self, batch: Batch) -> None:
        self.forwards += 1
        assert batch.tokens <= self.scheduler.limits.max_batch_tokens
        assert [item.decodes for item in batch.items] == sorted((item.decodes for item in batch.items), reverse=True)
        for item in batch.items:
            sequence = item.sequence
            assert sequence.state_slot is not None
            if item.restore is not None:
                self.states[sequence.state_slot] = list(self.saved[item.restore])
            elif item.fresh:
                self.states[sequence.state_slot] = []
        for item in batch.items:
            sequence, end = item.sequence, item.start + item.count
            ids = sequence.token_ids(0, end)
            for position in range(item.start, end):
                self.slots[self._slot(sequence, position)] = ids[position]
            state = self.states[sequence.state_slot]
            assert state == ids[: item.start], "the state does not hold exactly the tokens before this piece"
            state.extend(ids[item.start :])
            seen = [self.slots[self._slot(sequence, position)] for position in range(end)]
            assert seen == ids, "a block holds another sequence's tokens"
        for item in batch.items:
            if item.save is not None:
                self.saved[item.save] = list(self.states[item.sequence.state_slot])
        self.scheduler.finish(batch)
        for item in batch.sampled:
            self.grow(item.sequence)

    def grow(self, sequence: Sequence) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            return
        ids = sequence.token_ids(0, len(sequence))
        sequence.output_ids.append(sum(ids) % 7)
        if len(sequence.output_ids) >= sequence.params.max_tokens:
            self.scheduler.remove(sequence)

    @staticmethod
    def _slot(sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK


def run_all(caches: SimulatedCaches, sequences: list[Sequence], limit: int = 2000) -> None:
    scheduler = caches.scheduler
    for sequence in sequences:
        scheduler.add(sequence)
    while any(s.status is not SequenceStatus.FINISHED for s in sequences):
        batch = scheduler.schedule()
        assert batch.items, "nothing to run while sequences wait"
        caches.run(batch)
        assert caches.forwards < limit
    assert scheduler.blocks.free == scheduler.blocks.num_blocks
    assert scheduler.slots.free == scheduler.slots.num_slots


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 15, 16, 17, 33])
def test_every_length_runs_alone(length: int) -> None:
    sequence = make_sequence(list(range(length)))
    run_all(SimulatedCaches(make_scheduler()), [sequence])
    assert len(sequence.output_ids) == 4


def test_pieces_end_on_block_boundaries_and_on_the_last_one() -> None:
    scheduler = make_scheduler(chunk=10)
    sequence = make_sequence(list(range(31)), new_tokens=1)
    scheduler.add(sequence)
    caches, ends = SimulatedCaches(scheduler), []
    while sequence.status is not SequenceStatus.FINISHED:
        batch = scheduler.schedule()
        ends.append(batch.items[0].start + batch.items[0].count)
        caches.run(batch)
    assert ends == [8, 16, 24, 28, 31]


def test_same_prompt_again_starts_at_the_last_boundary() -> None:
    scheduler = make_scheduler()
    caches = SimulatedCaches(scheduler)
    first, second = make_sequence(list(range(18))), make_sequence(list(range(18)))
    run_all(caches, [first])
    run_all(caches, [second])
    assert (first.cached, second.cached) == (0, 16)
    assert first.output_ids == second.output_ids


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1])
def test_a_hit_always_leaves_one_token_to_compute(length: int) -> None:
    scheduler = make_scheduler()
    caches = SimulatedCaches(scheduler)
    run_all(caches, [make_sequence(list(range(length)))])
    again = make_sequence(list(range(length)))
    run_all(caches, [again])
    assert again.cached == (length - 1) // BLOCK * BLOCK


def test_forgotten_prefixes_are_no_hits() -> None:
    scheduler = make_scheduler()
    caches = SimulatedCaches(scheduler)
    run_all(caches, [make_sequence(list(range(18)))])
    scheduler.forget_prefixes()
    assert scheduler.counters.prefix_queries_tokens == 0
    again = make_sequence(list(range(18)))
    run_all(caches, [again])
    assert again.cached == 0


def test_edit_in_the_middle_shares_only_what_stands_before_it() -> None:
    scheduler = make_scheduler(chunk=BLOCK)
    caches = SimulatedCaches(scheduler)
    run_all(caches, [make_sequence(list(range(24)))])
    edited = list(range(24))
    edited[9] = 99
    sequence = make_sequence(edited)
    run_all(caches, [sequence])
    assert sequence.cached == 8


def test_second_turn_starts_from_the_first_answer() -> None:
    scheduler = make_scheduler()
    caches = SimulatedCaches(scheduler)
    first = make_sequence(list(range(10)), new_tokens=11)
    run_all(caches, [first])
    second = make_sequence([*first.token_ids(0, len(first)), 1, 2, 3])
    run_all(caches, [second])
    assert second.cached == 20, "the snapshot at the last full block of prompt and answer"


def test_block_without_snapshot_is_no_hit() -> None:
    scheduler = make_scheduler(chunk=16, snapshots=0)
    caches = SimulatedCaches(scheduler)
    run_all(caches, [make_sequence(list(range(18)))])
    again = make_sequence(list(range(18)))
    run_all(caches, [again])
    assert again.cached == 0


def test_same_placeholders_of_another_image_are_no_hit() -> None:
    scheduler = make_scheduler()
    caches = SimulatedCaches(scheduler)

    def with_image(digest: bytes) -> Sequence:
        visual = VisualTokens(digest, 9, np.zeros((9, 2), np.float32))
        return make_sequence([1, 2, *[7] * 9, 3, 4, 5], images=(ImageSpan(2, visual),))

    run_all(caches, [with_image(b"a" * 32)])
    other, same = with_image(b"b" * 32), with_image(b"a" * 32)
    run_all(caches, [other])
    run_all(caches, [same])
    assert (other.cached, same.cached) == (0, 12)


def test_image_shifted_by_one_placeholder_is_no_hit() -> None:
    scheduler = make_scheduler()
    caches = SimulatedCaches(scheduler)
    visual = VisualTokens(b"a" * 32, 12, np.zeros((12, 2), np.float32))
    run_all(caches, [make_sequence([7] * 12 + [1, 2], images=(ImageSpan(0, visual),))])
    shifted = make_sequence([7] * 13 + [1, 2], images=(ImageSpan(1, visual),))
    run_all(caches, [shifted])
    assert shifted.cached == 0


def test_text_before_an_image_runs_while_the_image_is_on_its_way() -> None:
    scheduler = make_scheduler()
    visual = VisualTokens(b"a" * 32, 6)
    sequence = make_sequence([*range(10), *[7] * 6, 3], images=(ImageSpan(10, visual),))
    scheduler.add(sequence)
    caches = SimulatedCaches(scheduler)
    batch = scheduler.schedule()
    assert (batch.items[0].start, batch.items[0].count) == (0, 8)
    caches.run(batch)
    assert not scheduler.schedule().items
    assert not scheduler.stuck(), "waiting for an image is not being stuck"
    visual.rows = np.zeros((6, 2), np.float32)
    while sequence.status is not SequenceStatus.FINISHED:
        caches.run(scheduler.schedule())
    assert len(sequence.output_ids) == 4


def test_sequence_that_waits_for_its_image_lets_others_pass() -> None:
    scheduler = make_scheduler()
    waits = make_sequence([7] * 6, images=(ImageSpan(0, VisualTokens(b"a" * 32, 6)),), name="waits")
    ready = make_sequence(list(range(6)), name="ready")
    scheduler.add(waits)
    scheduler.add(ready)
    assert [item.sequence for item in scheduler.schedule().items] == [ready]


def test_two_images_whose_span_is_longer_than_a_chunk_make_progress() -> None:
    scheduler = make_scheduler(chunk=BLOCK)
    caches = SimulatedCaches(scheduler)
    spans = tuple(
        ImageSpan(start, VisualTokens(bytes([start]) * 32, 9, np.zeros((9, 2), np.float32))) for start in (1, 11)
    )
    run_all(caches, [make_sequence([1, *[7] * 9, 2, *[7] * 9, 3], images=spans)])


def test_blocks_running_out_preempts_the_newest_and_all_end() -> None:
    scheduler = make_scheduler(blocks=8, chunk=16)
    caches = SimulatedCaches(scheduler)
    sequences = [make_sequence([i] * 10, new_tokens=12, name=str(i)) for i in range(3)]
    run_all(caches, sequences)
    assert scheduler.counters.preemptions > 0
    assert sequences[0].preemptions == 0, "the oldest keeps its blocks"
    alone = make_sequence([2] * 10, new_tokens=12)
    run_all(SimulatedCaches(make_scheduler()), [alone])
    assert sequences[2].output_ids == alone.output_ids


def test_paused_reader_stops_its_own_sequence_only() -> None:
    scheduler = make_scheduler()
    slow, quick = make_sequence([1] * 5, 8, "slow"), make_sequence([2] * 5, 8, "quick")
    scheduler.add(slow)
    scheduler.add(quick)
    caches = SimulatedCaches(scheduler)
    caches.run(scheduler.schedule())
    while slow.in_prefill or quick.in_prefill:
        caches.run(scheduler.schedule())
    slow.paused, before = True, len(slow.output_ids)
    while quick.status is not SequenceStatus.FINISHED:
        caches.run(scheduler.schedule())
    assert len(slow.output_ids) == before
    assert not scheduler.schedule().items and not scheduler.stuck()
    slow.paused = False
    while slow.status is not SequenceStatus.FINISHED:
        caches.run(scheduler.schedule())


def test_decode_steps_cannot_starve_a_prefill() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens 16 must be at least prefill_chunk_tokens 16"):
        make_scheduler(batch=16, chunk=16)


def test_removing_at_any_state_frees_everything() -> None:
    scheduler = make_scheduler(blocks=8)
    sequences = [make_sequence([i] * 9, name=str(i)) for i in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    batch = scheduler.schedule()
    for sequence in sequences:
        scheduler.remove(sequence)
    scheduler.finish(batch)
    assert scheduler.blocks.free == 8 and scheduler.slots.free == 8
    assert not scheduler.waiting and not scheduler.running


prompts = st.lists(
    st.tuples(st.sampled_from([0, 4, 8, 13]), st.integers(1, 24), st.integers(1, 9), st.integers(0, 6)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    prompts=prompts,
    blocks=st.integers(9, 20),
    chunk=st.sampled_from([2, 4, 5, 8, 16]),
    snapshots=st.sampled_from([0, 1, 3, 16]),
    prefix=st.booleans(),
)
def test_whatever_is_shared_preempted_or_aborted_every_forward_reads_its_own(
    prompts: list[tuple[int, int, int, int]], blocks: int, chunk: int, snapshots: int, prefix: bool
) -> None:
    """Prompts share beginnings; some are aborted after a few forwards; the pool is nearly too small."""
    scheduler = make_scheduler(blocks, batch=64, chunk=chunk, running=4, snapshots=snapshots, prefix=prefix)
    caches = SimulatedCaches(scheduler)
    sequences, aborts = [], {}
    for index, (shared, own, new_tokens, abort_after) in enumerate(prompts):
        ids = list(range(shared)) + [50 + index % 2] * min(own, 36 - shared - new_tokens)
        sequence = make_sequence(ids or [1], new_tokens, str(index))
        sequences.append(sequence)
        if abort_after:
            aborts[abort_after] = sequence
        scheduler.add(sequence)
    while any(s.status is not SequenceStatus.FINISHED for s in sequences):
        batch = scheduler.schedule()
        assert batch.items or not scheduler.stuck()
        assert batch.items
        caches.run(batch)
        gone = aborts.pop(caches.forwards, None)
        if gone is not None and gone.status is not SequenceStatus.FINISHED:
            scheduler.remove(gone)
        assert caches.forwards < 2000
    assert scheduler.blocks.free == blocks and scheduler.slots.free == 4


def test_a_prompt_of_many_forwards_gets_its_turn_beside_decode_steps() -> None:
    """With no bound of its own a piece still leaves room for the decode steps, or a prompt waited until they ended."""
    scheduler = make_scheduler(batch=20, chunk=0, running=3, prefix=False)
    caches = SimulatedCaches(scheduler)
    talker = make_sequence([1, 2, 3], new_tokens=1000)
    scheduler.add(talker)
    caches.run(scheduler.schedule())
    newcomer = make_sequence(list(range(60)))
    scheduler.add(newcomer)
    for _ in range(8):
        batch = scheduler.schedule()
        assert talker in [item.sequence for item in batch.items]
        caches.run(batch)
    assert newcomer.output_ids
