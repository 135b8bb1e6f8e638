"""Decides which tokens go into the next forward and who holds which blocks; knows neither tensors nor text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llm_svc.cache.block_pool import BlockPool
from llm_svc.cache.prefix import extend_keys
from llm_svc.cache.state_slots import Snapshots, StateSlots
from llm_svc.core import Batch, Scheduled, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that bound a forward.

    `max_batch_tokens` counts all tokens of a forward, `prefill_chunk_tokens` those of one sequence in it (0: as many as
    fit beside a decode step of every sequence), `max_running_sequences` the sequences that hold blocks at once.
    """

    max_batch_tokens: int = 2048
    prefill_chunk_tokens: int = 512
    max_running_sequences: int = 64
    prefix_cache: bool = True


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals, for the metrics."""

    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Continuous batching: decode steps first, then prefills under a token budget, then new sequences.

    A prefill piece that does not reach the end of its prompt ends on a block boundary, and one piece ends on the
    prompt's last boundary, where a snapshot of the recurrent state makes the prefix reusable. When blocks run out the
    newest running sequence gives its blocks back and starts over later, from the longest prefix that is still cached.
    """

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockPool, slots: StateSlots, snapshots: Snapshots | None
    ) -> None:
        longest_piece = limits.prefill_chunk_tokens or 1
        if limits.max_batch_tokens < longest_piece + limits.max_running_sequences:
            raise ValueError(
                f"max_batch_tokens {limits.max_batch_tokens} must be at least prefill_chunk_tokens {longest_piece} "
                f"+ max_running_sequences {limits.max_running_sequences}, or decode steps starve prefills"
            )
        self.limits = limits
        self.blocks = blocks
        self.slots = slots
        self.snapshots = snapshots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = SchedulerCounters()
        # A longer piece would wait until decode steps leave room for it, which may be never.
        self._chunk_tokens = limits.prefill_chunk_tokens or limits.max_batch_tokens - limits.max_running_sequences

    @property
    def capacity_tokens(self) -> int:
        """Most tokens one sequence can hold in the caches."""
        return self.blocks.num_blocks * self.blocks.block_size

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence; the caller has checked that it can ever fit."""
        assert len(sequence) <= self.capacity_tokens
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def forget_prefixes(self) -> None:
        """Drops all that earlier prompts left for reuse, and the counts of it."""
        self.blocks.forget_all()
        if self.snapshots is not None:
            self.snapshots.forget_all()
        self.counters = SchedulerCounters()

    def stuck(self) -> bool:
        """Whether sequences could run and yet `schedule` found nothing: a fault of this file, never of a request."""
        if any(s.paused or s.available() < len(s) for s in self.running):
            return False
        return any(not s.paused and s.available() == len(s) for s in (*self.running, *self.waiting))

    def schedule(self) -> Batch:
        """The next forward; empty when every sequence waits for images or for its reader."""
        decodes: list[Scheduled] = []
        prefills: list[Scheduled] = []
        budget = self.limits.max_batch_tokens
        planned: set[int] = set()
        for sequence in list(self.running):
            if sequence.status is not SequenceStatus.RUNNING or sequence.in_prefill or sequence.paused or budget < 1:
                continue
            if self._take_blocks(sequence, sequence.computed + 1, planned):
                decodes.append(self._decode(sequence))
                planned.add(sequence.id)
                budget -= 1
        for sequence in list(self.running):
            if sequence.status is SequenceStatus.RUNNING and sequence.in_prefill:
                item = self._prefill(sequence, budget, planned)
                if item is not None:
                    prefills.append(item)
                    planned.add(sequence.id)
                    budget -= item.count
        for sequence in list(self.waiting):
            if len(self.running) >= self.limits.max_running_sequences or self.slots.free == 0:
                break
            if sequence.paused or self._leader_in_prefill(sequence):
                continue
            admitted, item = self._admit(sequence, budget, planned)
            if item is not None:
                prefills.append(item)
                planned.add(sequence.id)
                budget -= item.count
            elif not admitted:
                break
        return Batch(tuple(sorted(decodes + prefills, key=lambda item: not item.decodes)))

    def finish(self, batch: Batch) -> None:
        """Records that a forward has run: full blocks and saved snapshots become findable.

        Sequences that were removed meanwhile are passed over.
        """
        block_size = self.blocks.block_size
        for item in batch.items:
            sequence = item.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                if item.save is not None and self.snapshots is not None:
                    self.snapshots.discard(item.save)
                continue
            sequence.computed = item.start + item.count
            full = sequence.computed // block_size
            if self.limits.prefix_cache:
                extend_keys(sequence, block_size, full)
                for index in range(item.start // block_size, full):
                    self.blocks.register(sequence.blocks[index], sequence.block_keys[index])
            if item.save is not None and self.snapshots is not None:
                key = sequence.block_keys[full - 1]
                self.snapshots.register(key, item.save)
                if item.decodes:
                    sequence.answer_snapshot = key

    def _decode(self, sequence: Sequence) -> Scheduled:
        start = sequence.computed
        save = self._save_row(sequence, start + 1, instead_of=sequence.answer_snapshot)
        return Scheduled(sequence, start, 1, samples=True, save=save)

    def _prefill(self, sequence: Sequence, budget: int, planned: set[int]) -> Scheduled | None:
        count = self._piece(sequence, budget)
        if count == 0 or not self._take_blocks(sequence, sequence.computed + count, planned):
            return None
        return self._item(sequence, count, fresh=False, restore=None)

    def _item(self, sequence: Sequence, count: int, *, fresh: bool, restore: int | None) -> Scheduled:
        end = sequence.computed + count
        return Scheduled(
            sequence,
            sequence.computed,
            count,
            samples=end == len(sequence),
            fresh=fresh,
            restore=restore,
            save=self._save_row(sequence, end),
        )

    def _piece(self, sequence: Sequence, budget: int) -> int:
        """Number of tokens of the next piece, 0 when it has to wait.

        Where a piece ends depends on the sequence alone, never on its neighbours: so its numbers do not either.
        """
        block_size = self.blocks.block_size
        start, length = sequence.computed, len(sequence)
        end = min(start + self._chunk_tokens, length)
        last_boundary = (length - 1) // block_size * block_size
        if self.snapshots is not None and start < last_boundary:
            end = min(end, last_boundary)
        if end < length and end // block_size * block_size > start:
            end = end // block_size * block_size
        ready = sequence.available()
        if ready < end:
            end = ready // block_size * block_size
        return end - start if 0 < end - start <= budget else 0

    def _admit(self, sequence: Sequence, budget: int, planned: set[int]) -> tuple[bool, Scheduled | None]:
        """Starts a waiting sequence from its longest cached prefix, or leaves it where it is.

        The flag is False where blocks or budget ran out, so that nobody overtakes; a sequence that only waits for an
        image lets others pass.
        """
        shared, restore = self._longest_prefix(sequence)
        sequence.computed = len(shared) * self.blocks.block_size
        count = self._piece(sequence, budget)
        fresh_blocks = self._blocks_for(sequence.computed + count) - len(shared)
        fits = fresh_blocks <= self.blocks.free - self.blocks.count_reusable(shared)
        if count == 0 or not fits:
            waits_for_image = self._piece(sequence, self.limits.max_batch_tokens) == 0
            sequence.computed = 0
            return waits_for_image, None
        for block in shared:
            self.blocks.share(block)
        sequence.blocks = shared
        self.waiting.remove(sequence)
        self.counters.prefix_queries_tokens += len(sequence)
        self.counters.prefix_hits_tokens += sequence.computed
        if sequence.preemptions == 0:
            sequence.cached = sequence.computed
        sequence.state_slot = self.slots.allocate()
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        taken = self._take_blocks(sequence, sequence.computed + count, planned)
        assert taken, "blocks were counted before they were taken"
        return True, self._item(sequence, count, fresh=restore is None, restore=restore)

    def _leader_in_prefill(self, sequence: Sequence) -> bool:
        """Whether another choice of the same request still computes the prompt that this one can then share."""
        return (
            sequence.choice > 0
            and self.limits.prefix_cache
            and any(other.request is sequence.request and other.in_prefill for other in self.running)
        )

    def _longest_prefix(self, sequence: Sequence) -> tuple[list[int], int | None]:
        """Cached blocks to share and the snapshot row to restore: both must exist at the same boundary."""
        if not self.limits.prefix_cache:
            return [], None
        block_size = self.blocks.block_size
        usable = (len(sequence) - 1) // block_size
        extend_keys(sequence, block_size, usable)
        found: list[int] = []
        for key in sequence.block_keys[:usable]:
            block = self.blocks.find(key)
            if block is None:
                break
            found.append(block)
        if self.snapshots is None:
            return found, None
        for length in range(len(found), 0, -1):
            row = self.snapshots.find(sequence.block_keys[length - 1])
            if row is not None:
                return found[:length], row
        return [], None

    def _save_row(self, sequence: Sequence, end: int, instead_of: bytes | None = None) -> int | None:
        """A snapshot row for the state after position `end`, when that is worth keeping."""
        block_size = self.blocks.block_size
        if self.snapshots is None or not self.limits.prefix_cache or end % block_size or end == 0:
            return None
        extend_keys(sequence, block_size, end // block_size)
        if sequence.block_keys[end // block_size - 1] in self.snapshots:
            return None
        return self.snapshots.reserve(instead_of)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.blocks.block_size)

    def _take_blocks(self, sequence: Sequence, tokens: int, planned: set[int]) -> bool:
        """Grows the block table to `tokens`; makes room by preempting newer sequences that are not planned yet."""
        while len(sequence.blocks) < self._blocks_for(tokens):
            block = self.blocks.allocate()
            if block is not None:
                sequence.blocks.append(block)
                continue
            victim = next((s for s in reversed(self.running) if s.id not in planned), None)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):
            self.blocks.release(block)
        sequence.blocks = []
        sequence.computed = 0
        if sequence.state_slot is not None:
            self.slots.release(sequence.state_slot)
            sequence.state_slot = None
