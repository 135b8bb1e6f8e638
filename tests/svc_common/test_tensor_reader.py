"""Tensors are read into their own buffers, as far ahead as the budget has room for, and hashed in order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from svc_common.object_store import ObjectStore, StoredFile
from svc_common.piece_reader import ReadLimits
from svc_common.safetensors_header import TensorSpan
from svc_common.store_errors import VersionChanged
from svc_common.tensor_reader import ChosenTensors, TensorBuffer, TensorReader

CONTENT = bytes(range(251)) * 8


class Watched(ObjectStore):
    """A folder whose reads are counted, and wait for `gate` where their start is in `held`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.starts: list[int] = []
        self.held: set[int] = set()
        self.gate = threading.Event()
        self.started = threading.Semaphore(0)

    def read_into(self, file: StoredFile, start: int, targets: Sequence[memoryview], **others: Any) -> None:
        self.starts.append(start)
        self.started.release()
        if start in self.held:
            assert self.gate.wait(20)
        super().read_into(file, start, targets, **others)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.started.acquire(timeout=20)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    return Watched(tmp_path)


def spans_of(*sides: tuple[int, int]) -> tuple[TensorSpan, ...]:
    return tuple(
        TensorSpan(f"t{number}", "U8", (stop - start,), start, stop) for number, (start, stop) in enumerate(sides)
    )


def reading(store: ObjectStore, spans: tuple[TensorSpan, ...], limits: ReadLimits, **options: Any) -> Any:
    options = {"allocate": bytearray, "on_bytes": lambda count: None} | options
    (file,) = store.list()
    return TensorReader(store, limits, **options).read([ChosenTensors(file, spans, True)])


@pytest.mark.parametrize("piece_bytes", [1, 7, 50, 64, 1000, 5000])
def test_every_cut_gives_the_same_tensors(store: Watched, piece_bytes: int) -> None:
    spans = spans_of((3, 3), (3, 10), (10, 11), (11, 111), (115, 400), (400, 400), (1900, 2000), (2000, 2000))
    told: list[int] = []
    found = list(reading(store, spans, ReadLimits(5000, piece_bytes, 4), on_bytes=told.append))
    assert [tensor.span for tensor in found] == list(spans)
    for tensor in found:
        wanted = CONTENT[tensor.span.start : tensor.span.stop]
        assert tensor.buffer == wanted and tensor.sha256() == hashlib.sha256(wanted).hexdigest()
    assert sum(told) == sum(span.size_bytes for span in spans)


def test_bytes_go_into_the_buffers_that_are_given(store: Watched) -> None:
    given: list[bytearray] = []

    def allocate(size_bytes: int) -> memoryview:
        given.append(bytearray(size_bytes))
        return memoryview(given[-1])

    found = list(reading(store, spans_of((0, 100), (100, 101)), ReadLimits(), allocate=allocate))
    assert [tensor.buffer.obj for tensor in found] == given
    assert b"".join(given) == CONTENT[:101]


@pytest.mark.parametrize(
    ("budget_bytes", "ahead"),
    # The first tensor takes 100 or, where that is more, half of the budget; later ones the rest, in pieces of 50.
    [(100, 1), (200, 2), (300, 4), (330, 4), (350, 5), (5000, 16)],
)
def test_the_budget_bounds_what_is_asked_for(store: Watched, budget_bytes: int, ahead: int) -> None:
    spans = spans_of(*((start, start + 100) for start in range(0, 900, 100)))
    store.held = set(range(50, 900, 50))
    tensors = reading(store, spans, ReadLimits(budget_bytes, 50, 32))
    taken: list[TensorBuffer] = []
    consumer = threading.Thread(target=lambda: taken.append(next(tensors)))
    consumer.start()
    store.wait_for(2 + ahead)
    # Nothing more can be asked for before the gate opens, however long one waits.
    assert not store.started.acquire(timeout=0.2)
    store.gate.set()
    consumer.join(20)
    assert taken[0].span.name == "t0" and len(store.starts) <= 2 + ahead + 2
    tensors.close()


def test_a_tensor_larger_than_the_budget_is_read(store: Watched) -> None:
    found = list(reading(store, spans_of((0, 1500), (1500, 1600)), ReadLimits(60, 50, 4)))
    assert [bytes(tensor.buffer) for tensor in found] == [CONTENT[:1500], CONTENT[1500:1600]]


def test_later_tensors_are_read_while_the_caller_is_at_work(store: Watched) -> None:
    tensors = reading(store, spans_of((0, 100), (100, 200), (200, 300)), ReadLimits(5000, 100, 1))
    next(tensors)
    store.wait_for(3)
    tensors.close()


def test_bytes_that_come_out_of_order_are_hashed_in_order(store: Watched) -> None:
    store.held = {0}
    tensors = reading(store, spans_of((0, 200)), ReadLimits(5000, 50, 4))
    taken: list[TensorBuffer] = []
    consumer = threading.Thread(target=lambda: taken.extend(tensors))
    consumer.start()
    store.wait_for(4)
    store.gate.set()
    consumer.join(20)
    assert taken[0].sha256() == hashlib.sha256(CONTENT[:200]).hexdigest()


def test_an_error_comes_in_its_turn_and_ends_the_reading(store: Watched, tmp_path: Path) -> None:
    """The tensors before it are given away first; those beside it in one range fail with it."""
    store.held = {100}
    tensors = reading(store, spans_of((0, 100), (100, 130), (130, 190), (200, 300)), ReadLimits(5000, 100, 2))
    assert next(tensors).buffer == CONTENT[:100]
    (tmp_path / "a.bin").write_bytes(CONTENT[::-1] + b"x")
    store.gate.set()
    with pytest.raises(VersionChanged, match=r"a\.bin"):
        next(tensors)
    assert next(tensors, None) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("day0-")]


def test_an_error_of_the_caller_ends_the_reading(store: Watched) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(reading(store, spans_of((0, 100), (100, 200)), ReadLimits(100, 10, 2), on_bytes=stop))
    assert len(store.starts) < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("day0-")]


def test_nothing_is_hashed_that_nobody_checks(store: Watched) -> None:
    (file,) = store.list()
    reader = TensorReader(store, ReadLimits(), bytearray, lambda count: None)
    (tensor,) = reader.read([ChosenTensors(file, spans_of((0, 100)), False)])
    with pytest.raises(AssertionError):
        tensor.sha256()
