"""Reads a sequence of ranges in order, the later ones already in flight, within a byte budget; knows no format."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from svc_common.object_store import ObjectStore, StoredFile

DEFAULT_BUDGET_BYTES = 512 * 1024 * 1024
DEFAULT_PIECE_BYTES = 16 * 1024 * 1024
DEFAULT_READERS = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a file."""

    file: StoredFile
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Most bytes held beyond what the caller keeps, bytes of one request, requests at a time."""

    budget_bytes: int = DEFAULT_BUDGET_BYTES
    piece_bytes: int = DEFAULT_PIECE_BYTES
    readers: int = DEFAULT_READERS

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "piece_bytes", "readers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.piece_bytes > self.budget_bytes:
            object.__setattr__(self, "piece_bytes", self.budget_bytes)


class PieceReader:
    """For a caller that takes each piece and lets go of it; TensorReader is for one that keeps them."""

    def __init__(self, store: ObjectStore, limits: ReadLimits) -> None:
        self._store = store
        self._limits = limits

    def read(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, memoryview]]:
        """The bytes of each piece, in order. One piece is always in flight, even where the budget has no room.

        Closing the iterator, or an error, cancels the waiting requests and waits for the running ones.
        """
        cancelled = threading.Event()
        flying: deque[tuple[Piece, Future[memoryview]]] = deque()
        flying_bytes = 0
        upcoming = iter(pieces)
        following = next(upcoming, None)
        pool = ThreadPoolExecutor(self._limits.readers, thread_name_prefix="day0-pieces")
        try:
            while True:
                while following is not None:
                    room = self._limits.budget_bytes - flying_bytes
                    if flying and following.size_bytes > room:
                        break
                    flying.append((following, pool.submit(self._fetch, following, cancelled)))
                    flying_bytes += following.size_bytes
                    following = next(upcoming, None)
                if not flying:
                    return
                piece, future = flying.popleft()
                content = future.result()
                # The future would keep the bytes alive.
                del future
                yield piece, content
                del content
                flying_bytes -= piece.size_bytes
        finally:
            cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, piece: Piece, cancelled: threading.Event) -> memoryview:
        return self._store.read_range(piece.file, piece.start, piece.stop, cancelled=cancelled)


def cut(file: StoredFile, start: int, stop: int, piece_bytes: int) -> Iterator[Piece]:
    """Bytes [start, stop) of a file in pieces of at most `piece_bytes`."""
    for begin in range(start, stop, piece_bytes):
        yield Piece(file, begin, min(begin + piece_bytes, stop))
