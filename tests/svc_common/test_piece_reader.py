"""Ranges arrive in order, as many ahead as the budget has room for, and end with their reader."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from svc_common.object_store import ObjectStore, RetryPolicy
from svc_common.piece_reader import Piece, PieceReader, ReadLimits, cut
from svc_common.store_errors import VersionChanged
from tests.s3_double import BUCKET, PREFIX, S3Double

CONTENT = bytes(range(200))


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    return ObjectStore(str(tmp_path))


class Pulled:
    """Pieces of ten bytes, counted as the reader takes them."""

    def __init__(self, store: ObjectStore) -> None:
        self._pieces = cut(store.list()[0], 0, len(CONTENT), 10)
        self.count = 0

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self.count += 1
            yield piece


def test_pieces_come_in_order(store: ObjectStore) -> None:
    pieces = Pulled(store)
    found = list(PieceReader(store, ReadLimits(60, 10, 3)).read(pieces))
    assert [(piece.start, piece.stop) for piece, _ in found] == [(start, start + 10) for start in range(0, 200, 10)]
    assert b"".join(content for _, content in found) == CONTENT
    assert [piece.size_bytes for piece in cut(found[0][0].file, 0, 25, 10)] == [10, 10, 5]


@pytest.mark.parametrize(("budget_bytes", "ahead"), [(40, 4), (20, 2), (15, 1), (5, 1)])
def test_budget_bounds_what_is_in_flight(store: ObjectStore, budget_bytes: int, ahead: int) -> None:
    pieces = Pulled(store)
    reading = PieceReader(store, ReadLimits(budget_bytes, 10, 8)).read(pieces)
    # One more has been taken than was sent: the one that had no room.
    next(reading)
    assert pieces.count == ahead + 1
    # The first piece is given back now; its room goes to the next one.
    next(reading)
    assert pieces.count == ahead + 2
    reading.close()  # type: ignore[attr-defined]


def test_closing_does_not_wait_for_a_retry() -> None:
    double = S3Double()
    waiting = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waiting.set()

    logger, handler = logging.getLogger("day0.object_store"), Watch()
    logger.addHandler(handler)
    try:
        double.put("a.bin", CONTENT)
        policy = RetryPolicy(first_delay_seconds=60, max_delay_seconds=60)
        store = ObjectStore(f"s3://{BUCKET}/{PREFIX}", config=double.config(), retry=policy)
        double.script.extend(["ok", "slow", "slow"])
        reading = PieceReader(store, ReadLimits(40, 10, 1)).read(Pulled(store))
        next(reading)
        assert waiting.wait(20)
        began = time.monotonic()
        reading.close()  # type: ignore[attr-defined]
        assert time.monotonic() - began < 20
        assert len(double.ranges("a.bin")) <= 3
    finally:
        logger.removeHandler(handler)
        double.stop()


def test_an_error_ends_the_reading(store: ObjectStore, tmp_path: Path) -> None:
    pieces = list(Pulled(store))
    (tmp_path / "a.bin").write_bytes(CONTENT + b"x")
    reading = PieceReader(store, ReadLimits(40, 10, 2)).read(pieces)
    with pytest.raises(VersionChanged, match=r"a\.bin"):
        next(reading)
    assert next(reading, None) is None


@pytest.mark.parametrize("field", ["budget_bytes", "piece_bytes", "readers"])
def test_limits_name_the_field(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: must be at least 1, not 0"):
        ReadLimits(**{field: 0})


def test_a_piece_is_never_above_the_budget() -> None:
    assert ReadLimits(budget_bytes=100).piece_bytes == 100
