"""Rows arrive whole and in order, or the error says what differs."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svc_common.errors import Internal
from svc_common.tensors import RowAssembler, WireError, chunk_rows, crc32c

DATA = bytes(range(1, 25))


def _assemble(data: bytes, rows: int, row_bytes: int, max_bytes: int) -> bytes:
    assembler = RowAssembler(rows, row_bytes)
    for chunk in chunk_rows(data, rows, row_bytes, max_bytes):
        assert len(chunk[2]) <= max_bytes
        assembler.add(*chunk)
    return bytes(assembler.finish(rows, len(data), hashlib.sha256(data).digest()))


@given(rows=st.integers(0, 40), row_bytes=st.integers(1, 9), max_bytes=st.integers(9, 50), seed=st.binary(min_size=1))
def test_round_trip(rows: int, row_bytes: int, max_bytes: int, seed: bytes) -> None:
    data = (seed * (rows * row_bytes))[: rows * row_bytes]
    assert _assemble(data, rows, row_bytes, max_bytes) == data


def test_checksum_is_the_standard_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_chunks_are_at_most_one_mib_by_default() -> None:
    row_bytes = 7168 * 2
    sizes = [len(data) for _, _, data, _ in chunk_rows(bytes(100 * row_bytes), 100, row_bytes)]
    assert max(sizes) == 73 * row_bytes <= 1024 * 1024
    assert sum(sizes) == 100 * row_bytes


def test_typed_memory_is_taken_as_bytes() -> None:
    view = memoryview(DATA).cast("I")
    assert b"".join(chunk[2] for chunk in chunk_rows(view, 3, 8)) == DATA


@pytest.mark.parametrize(
    ("rows", "row_bytes", "message"),
    [(4, 8, "24 bytes"), (0, 8, "24 bytes"), (-3, -8, "rows -3"), (3, 0, "row_bytes 0")],
)
def test_sender_refuses_sizes_that_do_not_agree(rows: int, row_bytes: int, message: str) -> None:
    with pytest.raises(WireError, match=message):
        list(chunk_rows(DATA, rows, row_bytes))


def test_sender_refuses_a_row_longer_than_a_chunk() -> None:
    with pytest.raises(WireError, match=r"row_bytes.*limit 7, value 8"):
        list(chunk_rows(DATA, 3, 8, 7))


@pytest.mark.parametrize(
    ("offset", "count", "data", "checksum", "message"),
    [
        (1, 1, DATA[:8], None, "offset 1 differs from the 0 rows"),
        (0, 4, DATA + DATA[:8], None, "4 rows at 0 does not fit 3 rows"),
        (0, 0, b"", None, "0 rows at 0"),
        (0, -1, b"", None, "-1 rows at 0"),
        (0, 1, DATA[:7], None, "7 bytes, 1 rows need 8"),
        (0, 1, DATA[:9], None, "9 bytes, 1 rows need 8"),
        (0, 1, DATA[:8], 0, "crc32c of chunk at row 0"),
    ],
)
def test_receiver_refuses_a_bad_chunk(offset: int, count: int, data: bytes, checksum: int | None, message: str) -> None:
    assembler = RowAssembler(3, 8)
    with pytest.raises(WireError, match=message):
        assembler.add(offset, count, data, crc32c(data) if checksum is None else checksum)
    assert assembler.rows_received == 0


def test_receiver_refuses_a_repeated_chunk() -> None:
    assembler = RowAssembler(3, 8)
    assembler.add(0, 1, DATA[:8], crc32c(DATA[:8]))
    with pytest.raises(WireError, match="offset 0 differs from the 1 rows"):
        assembler.add(0, 1, DATA[:8], crc32c(DATA[:8]))


@pytest.mark.parametrize(
    ("rows", "total_bytes", "digest", "message"),
    [
        (2, 24, None, "rows differ: header 3, received 3, trailer 2"),
        (3, 23, None, "bytes differ: received 24, trailer 23"),
        (3, 24, bytes(32), "sha256 differs"),
        (3, 24, b"", "sha256 differs"),
    ],
)
def test_receiver_refuses_a_bad_trailer(rows: int, total_bytes: int, digest: bytes | None, message: str) -> None:
    assembler = RowAssembler(3, 8)
    assembler.add(0, 3, DATA, crc32c(DATA))
    with pytest.raises(WireError, match=message):
        assembler.finish(rows, total_bytes, hashlib.sha256(DATA).digest() if digest is None else digest)


def test_receiver_refuses_a_short_stream_and_a_late_chunk() -> None:
    assembler = RowAssembler(3, 8)
    assembler.add(0, 2, DATA[:16], crc32c(DATA[:16]))
    with pytest.raises(WireError, match="received 2"):
        assembler.finish(3, 24, hashlib.sha256(DATA[:16]).digest())
    empty = RowAssembler(0, 8)
    assert empty.finish(0, 0, hashlib.sha256().digest()) == bytearray()
    with pytest.raises(WireError, match="after the trailer"):
        empty.add(0, 1, DATA[:8], crc32c(DATA[:8]))
    with pytest.raises(WireError, match="second trailer"):
        empty.finish(0, 0, hashlib.sha256().digest())


def test_announced_size_is_limited_before_memory_is_taken() -> None:
    with pytest.raises(WireError, match=r"limit 2147483648, value 4611686018427387904"):
        RowAssembler(2**31, 2**31)
    with pytest.raises(WireError, match="rows -1"):
        RowAssembler(-1, 8)


def test_wire_error_is_our_own_fault_to_the_caller() -> None:
    assert issubclass(WireError, Internal)
