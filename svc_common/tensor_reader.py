"""Reads tensors straight into buffers of their own, ranges in flight together, within a byte budget; casts nothing.

A buffer is the tensor's for good, so a caller that keeps tensors as they are holds no byte twice.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from svc_common.object_store import ObjectStore, StoredFile
from svc_common.piece_reader import Piece, ReadLimits, cut
from svc_common.safetensors_header import TensorSpan

Buffer = bytearray | memoryview
Allocate = Callable[[int], Buffer]
"""Gives a writable buffer of so many bytes. What it has not touched takes no memory before it is read into."""

# Unread bytes between two chosen tensors that are cheaper to read than to ask for separately.
_BRIDGED_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ChosenTensors:
    """Tensors of one file, by place; `hashed` where somebody will ask for their digests."""

    file: StoredFile
    spans: tuple[TensorSpan, ...]
    hashed: bool


class TensorBuffer:
    """A tensor while its bytes arrive, in any order; what is there from its start on is hashed by who brings it."""

    def __init__(self, file: StoredFile, span: TensorSpan, buffer: Buffer, hashed: bool) -> None:
        self.file = file
        self.span = span
        self.buffer = buffer
        self.asked_bytes = 0
        self.failure: Exception | None = None
        self._view = memoryview(buffer)
        self._digest = hashlib.sha256() if hashed else None
        self._lock = threading.Lock()
        self._hashing = False
        self._arrived: dict[int, int] = {}
        self._position = span.start

    @property
    def settled(self) -> bool:
        """Whether all bytes are there and hashed, or one reading has failed."""
        return self._position == self.span.stop or self.failure is not None

    def part(self, start: int, stop: int) -> memoryview:
        """The place of bytes [start, stop) of the file."""
        return self._view[start - self.span.start : stop - self.span.start]

    def arrived(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the file are in their place. Thread safe; one thread at a time hashes for all."""
        with self._lock:
            self._arrived[start] = stop
            if self._hashing:
                return
            self._hashing = True
        while True:
            with self._lock:
                following = self._arrived.pop(self._position, None)
                if following is None:
                    self._hashing = False
                    return
            if self._digest is not None:
                self._digest.update(self.part(self._position, following))
            self._position = following

    def sha256(self) -> str:
        """Hexadecimal, once all bytes are there."""
        assert self._digest is not None and self._position == self.span.stop
        return self._digest.hexdigest()


class TensorReader:
    """One reading of some tensors; `on_bytes` is told, in the caller's thread, how many more are in their place."""

    def __init__(
        self,
        store: ObjectStore,
        limits: ReadLimits,
        allocate: Allocate,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._store = store
        self._limits = limits
        self._allocate = allocate
        self._on_bytes = on_bytes
        self._begun: deque[TensorBuffer] = deque()
        self._asked_bytes = 0
        self._flying = 0
        self._failed = False
        self._landed: SimpleQueue[int] = SimpleQueue()
        self._cancelled = threading.Event()

    def read(self, files: Iterable[ChosenTensors]) -> Generator[TensorBuffer, None, None]:
        """Each tensor once, in order, complete and hashed where it is to be. Raises StoreError.

        Bytes asked for of tensors not yet given away stay within the budget; the next one to be given away counts at
        most half of it, and one range is always in flight. Closing the iterator, or an error, cancels the waiting
        requests and waits for the running ones.
        """
        chosen = list(files)
        ranges = (planned for one in chosen for planned in _planned(one, self._limits.piece_bytes))
        following = next(ranges, None)
        pool = ThreadPoolExecutor(self._limits.readers, thread_name_prefix="day0-tensors")
        try:
            for one in chosen:
                for span in one.spans:
                    if not span.size_bytes:
                        yield TensorBuffer(one.file, span, self._allocate(0), one.hashed)
                        continue
                    while True:
                        while following is not None and self._has_room(*following):
                            pool.submit(self._fetch, *self._begin(*following))
                            following = next(ranges, None)
                        if self._begun[0].settled:
                            break
                        self._take_landed()
                    while not self._landed.empty():
                        self._take_landed()
                    yield self._give_away(span)
            while self._flying:
                self._take_landed()
        finally:
            self._cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _has_room(self, piece: Piece, one: ChosenTensors, spans: list[TensorSpan]) -> bool:
        if self._failed:
            # All before the range that failed was asked for earlier, and comes; nothing after it is wanted.
            return False
        if not self._begun:
            return True
        head = self._begun[0]
        # The memory of the one to come next is the caller's from the next step on, and no more than that.
        if spans[-1] is head.span or not (self._flying or head.settled):
            return True
        budget = self._limits.budget_bytes
        held = self._asked_bytes - head.asked_bytes + min(head.asked_bytes, budget // 2)
        return held + piece.size_bytes <= budget

    def _begin(
        self, piece: Piece, one: ChosenTensors, spans: list[TensorSpan]
    ) -> tuple[Piece, list[memoryview], list[tuple[TensorBuffer, int, int]]]:
        """Buffers for the tensors of which this is the first range, and where its bytes belong, gaps included."""
        targets, parts = [], []
        position = piece.start
        for span in spans:
            if not self._begun or self._begun[-1].span is not span:
                self._begun.append(TensorBuffer(one.file, span, self._allocate(span.size_bytes), one.hashed))
            tensor = self._begun[-1]
            start, stop = max(span.start, piece.start), min(span.stop, piece.stop)
            if start > position:
                targets.append(memoryview(bytearray(start - position)))
            targets.append(tensor.part(start, stop))
            parts.append((tensor, start, stop))
            tensor.asked_bytes += stop - start
            self._asked_bytes += stop - start
            position = stop
        self._flying += 1
        return piece, targets, parts

    def _fetch(self, piece: Piece, targets: list[memoryview], parts: list[tuple[TensorBuffer, int, int]]) -> None:
        landed = 0
        try:
            self._store.read_into(piece.file, piece.start, targets, cancelled=self._cancelled)
            for tensor, start, stop in parts:
                tensor.arrived(start, stop)
                landed += stop - start
        except Exception as error:
            self._failed = True
            for tensor, _, _ in parts:
                # The first cause: what else was under way may only fail of its consequences.
                tensor.failure = tensor.failure or error
        finally:
            self._landed.put(landed)

    def _take_landed(self) -> None:
        landed = self._landed.get()
        self._flying -= 1
        self._on_bytes(landed)

    def _give_away(self, span: TensorSpan) -> TensorBuffer:
        tensor = self._begun.popleft()
        assert tensor.span is span
        if tensor.failure is not None:
            raise tensor.failure
        self._asked_bytes -= tensor.asked_bytes
        return tensor


def _planned(one: ChosenTensors, piece_bytes: int) -> Iterator[tuple[Piece, ChosenTensors, list[TensorSpan]]]:
    """Ranges of at most `piece_bytes` over all tensors, each with the tensors it has bytes of."""
    for run in _runs(one.spans, min(_BRIDGED_BYTES, piece_bytes)):
        first = 0
        for piece in cut(one.file, run[0].start, run[-1].stop, piece_bytes):
            while run[first].stop <= piece.start:
                first += 1
            last = first
            while last < len(run) and run[last].start < piece.stop:
                last += 1
            if last > first:
                yield piece, one, run[first:last]


def _runs(spans: tuple[TensorSpan, ...], bridged_bytes: int) -> Iterator[list[TensorSpan]]:
    """Tensors that have bytes, which come by place, parted where more than `bridged_bytes` lie between two."""
    run: list[TensorSpan] = []
    for span in spans:
        if not span.size_bytes:
            continue
        if run and span.start - run[-1].stop > bridged_bytes:
            yield run
            run = []
        run.append(span)
    if run:
        yield run
