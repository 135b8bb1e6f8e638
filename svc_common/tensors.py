"""Rows of a tensor on the wire, in checked chunks; knows bytes only, no dtype and no tensor library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import google_crc32c

from svc_common.errors import Internal

MAX_CHUNK_BYTES = 1024 * 1024
MAX_TENSOR_BYTES = 2 * 1024**3


class WireError(Internal):
    """What arrived is not what was announced; the message names what differs."""


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of the bytes, unsigned 32 bit."""
    return int(google_crc32c.value(bytes(data) if isinstance(data, memoryview) else data))


def chunk_rows(
    data: bytes | bytearray | memoryview, rows: int, row_bytes: int, max_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[tuple[int, int, bytes, int]]:
    """Cuts row-major `data` (`rows * row_bytes` bytes) into whole rows.

    Yields (index of the first row, number of rows, bytes, CRC-32C), each at most `max_bytes` long. Raises WireError
    when the sizes do not agree or one row is longer than `max_bytes`.
    """
    view = memoryview(data).cast("B")
    if rows < 0 or row_bytes <= 0 or len(view) != rows * row_bytes:
        raise WireError(f"rows {rows} * row_bytes {row_bytes} is not the length of the data, {len(view)} bytes")
    if row_bytes > max_bytes:
        raise WireError("one row is longer than a chunk", field="row_bytes", limit=max_bytes, value=row_bytes)
    step = max_bytes // row_bytes
    for offset in range(0, rows, step):
        count = min(step, rows - offset)
        piece = bytes(view[offset * row_bytes : (offset + count) * row_bytes])
        yield offset, count, piece, crc32c(piece)


class RowAssembler:
    """Puts chunks back together; every violation raises WireError."""

    def __init__(self, rows: int, row_bytes: int, *, max_bytes: int = MAX_TENSOR_BYTES) -> None:
        if rows < 0 or row_bytes <= 0:
            raise WireError(f"bad sizes: rows {rows}, row_bytes {row_bytes}")
        if rows * row_bytes > max_bytes:
            raise WireError(
                "the tensor is too large", field="rows * row_bytes", limit=max_bytes, value=rows * row_bytes
            )
        self.rows = rows
        self.row_bytes = row_bytes
        self.rows_received = 0
        self._data = bytearray(rows * row_bytes)
        self._sha256 = hashlib.sha256()
        self._finished = False

    def add(self, offset: int, count: int, data: bytes, crc32c: int) -> None:
        """Takes the next chunk: rows [offset, offset + count) as `count * row_bytes` bytes."""
        if self._finished:
            raise WireError("a chunk came after the trailer", field="offset", value=offset)
        if offset != self.rows_received:
            raise WireError(f"chunk offset {offset} differs from the {self.rows_received} rows received")
        if count <= 0 or offset + count > self.rows:
            raise WireError(f"chunk of {count} rows at {offset} does not fit {self.rows} rows", field="count")
        if len(data) != count * self.row_bytes:
            raise WireError(
                f"chunk data is {len(data)} bytes, {count} rows need {count * self.row_bytes}", field="data"
            )
        found = google_crc32c.value(data)
        if found != crc32c:
            raise WireError(f"crc32c of chunk at row {offset} is {found:#010x}, announced {crc32c:#010x}")
        start = offset * self.row_bytes
        self._data[start : start + len(data)] = data
        self._sha256.update(data)
        self.rows_received += count

    def finish(self, rows: int, total_bytes: int, sha256: bytes) -> bytearray:
        """Checks the trailer against what was received and announced; returns the data, `rows * row_bytes` bytes."""
        if self._finished:
            raise WireError("a second trailer came")
        if rows != self.rows or self.rows_received != self.rows:
            raise WireError(
                f"rows differ: header {self.rows}, received {self.rows_received}, trailer {rows}", field="rows"
            )
        if total_bytes != len(self._data):
            raise WireError(f"bytes differ: received {len(self._data)}, trailer {total_bytes}", field="bytes")
        if sha256 != self._sha256.digest():
            raise WireError(f"sha256 differs: received {self._sha256.hexdigest()}, trailer {sha256.hex()}")
        self._finished = True
        return self._data
