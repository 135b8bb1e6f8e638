"""Blocks: counted by reference, findable while registered, evicted longest unused first."""

from __future__ import annotations

import pytest

from llm_svc.cache.block_pool import BlockPool
from llm_svc.cache.state_slots import Snapshots, StateSlots


def test_first_and_last_block_are_handed_out_and_no_more() -> None:
    pool = BlockPool(3, 16)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    assert pool.free == 0


def test_unregistered_block_is_forgotten_and_registered_one_is_found() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None and second is not None
    pool.register(first, b"a")
    pool.release(first)
    pool.release(second)
    assert pool.free == 2
    assert pool.find(b"a") == first
    pool.share(first)
    assert pool.free == 1


def test_longest_unused_is_evicted_first_and_unused_before_it() -> None:
    pool = BlockPool(3, 16)
    blocks = [pool.allocate() for _ in range(3)]
    for block, key in zip(blocks, (b"a", b"b"), strict=False):
        assert block is not None
        pool.register(block, key)
    for block in (blocks[1], blocks[0], blocks[2]):
        assert block is not None
        pool.release(block)
    assert pool.allocate() == blocks[2], "a block without content goes first"
    assert pool.allocate() == blocks[1], "then the one unused longest"
    assert pool.find(b"b") is None
    assert pool.find(b"a") == blocks[0]


def test_second_block_of_the_same_content_stays_unregistered() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None and second is not None
    pool.register(first, b"a")
    pool.register(second, b"a")
    pool.release(second)
    assert pool.find(b"a") == first
    assert pool.allocate() == second


def test_releasing_twice_is_a_fault() -> None:
    pool = BlockPool(1, 16)
    block = pool.allocate()
    assert block is not None
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0, 16)


def test_state_slots_hand_out_each_row_once() -> None:
    slots = StateSlots(2)
    assert (slots.allocate(), slots.allocate(), slots.allocate()) == (0, 1, None)
    slots.release(1)
    assert slots.free == 1
    with pytest.raises(AssertionError):
        slots.release(1)


def test_snapshot_used_longest_ago_gives_its_row() -> None:
    snapshots = Snapshots(2)
    for key in (b"a", b"b"):
        row = snapshots.reserve()
        assert row is not None
        snapshots.register(key, row)
    kept = snapshots.find(b"a")
    row = snapshots.reserve()
    assert row is not None and row != kept
    assert b"b" not in snapshots and b"a" in snapshots
    snapshots.register(b"c", row)
    assert snapshots.find(b"c") == row


def test_snapshots_can_be_off() -> None:
    assert Snapshots(0).reserve() is None


def test_snapshot_of_a_growing_answer_is_replaced() -> None:
    snapshots = Snapshots(2)
    for key in (b"prompt", b"answer-1"):
        row = snapshots.reserve()
        assert row is not None
        snapshots.register(key, row)
    row = snapshots.reserve(instead_of=b"answer-1")
    assert row is not None
    snapshots.register(b"answer-2", row)
    assert b"prompt" in snapshots and b"answer-2" in snapshots and b"answer-1" not in snapshots
