"""Parses the header of a safetensors file, at least as strictly as the safetensors library; reads no file itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from svc_common.checkpoint_errors import HeaderError
from svc_common.strict_json import parse_strict_json

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
# The library computes sizes in 64 bits and refuses what does not fit.
_MAX_COUNT = 2**64 - 1
_METADATA = "__metadata__"

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, by the name the format has for the dtype."""


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor of a file: elements of `dtype` in `shape`, little endian, row major, in bytes [start, stop) of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All tensors of a file in the order of their bytes, without a gap from byte `data_start` to the file's end."""

    tensors: Mapping[str, TensorSpan]
    metadata: Mapping[str, str]
    data_start: int


def header_length(first: bytes | memoryview, file_bytes: int, file: str) -> int:
    """Length in bytes of the JSON text, from the first 8 bytes of a file of `file_bytes`; raises HeaderError."""
    if file_bytes < LENGTH_BYTES or len(first) < LENGTH_BYTES:
        raise HeaderError(file, f"{file_bytes} bytes are less than the {LENGTH_BYTES} of a header's length")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(file, f"a header of {length} bytes is above the limit of {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > file_bytes:
        raise HeaderError(file, f"a header of {length} bytes does not fit into the file's {file_bytes}")
    return length


def parse_header(text: bytes | memoryview, file_bytes: int, file: str) -> SafetensorsHeader:
    """The header whose JSON text is `text`, the bytes after the length, of a file of `file_bytes`.

    Refused beyond what the library refuses: a name given twice, and keys the format does not have. Raises HeaderError.
    """
    if bytes(text[:1]) != b"{":
        raise HeaderError(file, "the header does not begin with '{'")
    entries = _parse_json(text, file)
    metadata = _metadata(entries.pop(_METADATA, {}), file)
    data_start = LENGTH_BYTES + len(text)
    spans = [_span(name, entry, data_start, file) for name, entry in entries.items()]
    # Stable, and as the library sorts: an empty tensor comes before the one that starts where it stands.
    spans.sort(key=lambda span: (span.start, span.stop))
    end = data_start
    for span in spans:
        if span.start != end:
            kind = "a hole" if span.start > end else "an overlap"
            raise HeaderError(file, f"data_offsets leave {kind} at byte {end} of the file", span.name)
        end = span.stop
    if end != file_bytes:
        last = spans[-1].name if spans else None
        raise HeaderError(file, f"the data end at byte {end}, the file at byte {file_bytes}", last)
    return SafetensorsHeader({span.name: span for span in spans}, metadata, data_start)


def _parse_json(text: bytes | memoryview, file: str) -> dict[str, Any]:
    try:
        parsed = parse_strict_json(text)
    except ValueError as error:
        raise HeaderError(file, f"the header is no valid JSON: {error}") from error
    # Nothing but an object begins with '{'.
    assert isinstance(parsed, dict)
    return parsed


def _metadata(entry: Any, file: str) -> dict[str, str]:
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise HeaderError(file, f"{_METADATA} is no object of strings")
    return entry


def _span(name: str, entry: Any, data_start: int, file: str) -> TensorSpan:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(file, "its entry must have dtype, shape and data_offsets and nothing else", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(file, f"dtype {dtype!r} is unknown", name)
    if not _counts(shape):
        raise HeaderError(file, f"shape {shape!r} is no list of counts", name)
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(file, f"data_offsets {offsets!r} are no begin and end", name)
    bits = 1
    for factor in (*shape, DTYPE_BITS[dtype]):
        bits *= factor
        if bits > _MAX_COUNT:
            raise HeaderError(file, f"the size of {dtype} {shape} does not fit into 64 bits", name)
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise HeaderError(file, f"{dtype} {shape} has {bits} bits, data_offsets give it {end - begin} bytes", name)
    return TensorSpan(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _counts(items: Any) -> bool:
    # `true` and 1.0 are equal to 1 in Python and no counts in the format.
    return isinstance(items, list) and all(type(item) is int and 0 <= item <= _MAX_COUNT for item in items)
