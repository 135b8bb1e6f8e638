"""Worker processes deliver the batches that one process would make, in order, and say when they fail."""

from __future__ import annotations

import numpy as np
import pytest

from training.demo import feed
from training.demo.batches import Batch, make_batch
from training.demo.feed import Feed, Shape, batch_seed, start_workers

WORDS_ONLY = {"facts": 1.0, "sums": 1.0, "pairs": 1.0}
SHORT = Shape(128, 4, 0, WORDS_ONLY)
LONG = Shape(512, 2, 3, WORDS_ONLY)


def expected(number: int, shape: Shape) -> Batch:
    return make_batch(batch_seed(5, number), shape.length, shape.rows, shape.max_images, mix=shape.mix)


def test_batches_come_in_order_whatever_the_workers() -> None:
    with start_workers(2, [SHORT, LONG], seed=5) as running:
        order = []
        for number in range(12):
            index, batch = running.take(next_shape=1 if number >= 4 else 0)
            order.append(index)
            wanted = expected(number, (SHORT, LONG)[index])
            for name in ("ids", "task", "images", "image_slots"):
                assert np.array_equal(getattr(batch, name), getattr(wanted, name)), (number, name)
    # Four were asked for ahead, and four more before the change.
    assert order == [0] * 8 + [1] * 4


def test_a_failure_in_a_worker_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Batch:
        raise LookupError("the ink is empty")

    monkeypatch.setattr(feed, "make_batch", broken)
    with (
        start_workers(1, [SHORT]) as running,
        pytest.raises(RuntimeError, match=r"batch 0 .*\n(.*\n)*.*the ink is empty"),
    ):
        running.take(0)


def test_a_dead_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(feed, "make_batch", lambda *_: exit(3))
    with start_workers(1, [SHORT]) as running, pytest.raises(RuntimeError, match="ended without a word: batches-0"):
        running.take(0)


def test_a_feed_needs_workers() -> None:
    with pytest.raises(ValueError, match="got 0 workers and 1 shapes"):
        Feed(0, [SHORT])
