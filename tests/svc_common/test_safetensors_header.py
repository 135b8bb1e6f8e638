"""Every header that the safetensors library refuses is refused, and every sound one is read as it reads it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from svc_common.checkpoint_errors import HeaderError
from svc_common.safetensors_header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    header_length,
    parse_header,
)


def file_bytes(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def parse(content: bytes) -> SafetensorsHeader:
    length = header_length(content[:8], len(content), "a.safetensors")
    return parse_header(content[8 : 8 + length], len(content), "a.safetensors")


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# The published cases: file content and what the message must say beside the file's name.
REFUSED = {
    "7 bytes": (b"\0" * 7, "7 bytes are less"),
    "zero header": (b"\0" * 8, "does not begin with '{'"),
    "header huge": ((2**63).to_bytes(8, "little") + b"{}", "above the limit of 100000000"),
    "header 101 MB": ((105_906_176).to_bytes(8, "little") + b"{}", "above the limit of 100000000"),
    "header past eof": ((4096).to_bytes(8, "little") + b"{}", "a header of 4096 bytes does not fit"),
    "end below begin": (file_bytes({"a": entry(offsets=(8, 4))}, b"\0" * 8), "tensor 'a': data_offsets"),
    "negative": (file_bytes({"a": entry(offsets=(-4, 0))}, b"\0" * 4), "tensor 'a': data_offsets"),
    "shape overflow": (
        file_bytes({"a": entry(shape=(2**33, 2**33), offsets=(0, 8))}, b"\0" * 8),
        "tensor 'a': the size",
    ),
    "shape mismatch": (file_bytes({"a": entry(shape=(3,), offsets=(0, 8))}, b"\0" * 8), "tensor 'a': F32"),
    "unknown dtype": (file_bytes({"a": entry("X99")}, b"\0" * 4), "tensor 'a': dtype 'X99'"),
    "truncated data": (file_bytes({"a": entry(shape=(4,), offsets=(0, 16))}, b"\0" * 8), "tensor 'a': the data end"),
    "overflow hidden by a zero": (
        file_bytes({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}, b""),
        "tensor 'a': the size",
    ),
    "half a byte": (file_bytes({"a": entry("F4", (3,), (0, 1))}, b"\0"), "tensor 'a': F4"),
    "hole": (
        file_bytes({"a": entry(), "b": entry(offsets=(8, 12))}, b"\0" * 12),
        "tensor 'b': data_offsets leave a hole",
    ),
    "overlap": (
        file_bytes({"a": entry(), "b": entry(offsets=(2, 6))}, b"\0" * 6),
        "tensor 'b': data_offsets leave an over",
    ),
    "trailing data": (file_bytes({"a": entry()}, b"\0" * 5), "tensor 'a': the data end"),
    "shape of floats": (file_bytes({"a": entry(shape=(1.0,))}, b"\0" * 4), "tensor 'a': shape [1.0]"),
    "shape of truth": (file_bytes({"a": entry(shape=(True,))}, b"\0" * 4), "tensor 'a': shape [True]"),
    "no shape": (file_bytes({"a": {"dtype": "U8", "data_offsets": [0, 0]}}, b""), "tensor 'a': its entry"),
    "unknown key": (file_bytes({"a": {**entry(), "stride": 1}}, b"\0" * 4), "tensor 'a': its entry"),
    "entry is a list": (file_bytes({"a": []}, b""), "tensor 'a': its entry"),
    "metadata of numbers": (file_bytes({"__metadata__": {"a": 1}}, b""), "__metadata__"),
    "leading space": (file_bytes(b" {}", b""), "does not begin with '{'"),
    "no JSON": (file_bytes(b"{'a': 1}", b""), "no valid JSON"),
    "no UTF-8": (file_bytes(b'{"\xff": 1}', b""), "no valid JSON"),
    "half a surrogate": (
        file_bytes(rb'{"\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b""),
        "no valid JSON",
    ),
    "NaN": (file_bytes(b'{"a": NaN}', b""), "NaN is no JSON number"),
    "nested": (file_bytes(b'{"a": ' + b"[" * 100_000, b""), "nested too deeply"),
    "named twice": (
        file_bytes(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        "'a' appears twice",
    ),
}

# The library lets these pass.
OURS_ALONE = {"unknown key", "named twice", "leading space"}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_file_and_tensor(content: bytes, message: str) -> None:
    with pytest.raises(HeaderError) as caught:
        parse(content)
    assert str(caught.value).startswith("a.safetensors: ") and message in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(REFUSED) - OURS_ALONE))
def test_the_library_refuses_the_same(name: str) -> None:
    with pytest.raises(SafetensorError):
        deserialize(REFUSED[name][0])


def test_limit_is_the_librarys() -> None:
    assert header_length((MAX_HEADER_BYTES).to_bytes(8, "little"), MAX_HEADER_BYTES + 8, "a") == MAX_HEADER_BYTES
    with pytest.raises(HeaderError):
        header_length((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), MAX_HEADER_BYTES + 9, "a")


def test_sound_files_are_read() -> None:
    content = file_bytes(
        {"b": entry("F8_E8M0", (3,), (0, 3)), "empty": entry("F32", (0, 8), (3, 3)), "__metadata__": {"format": "pt"}},
        b"\0\x7f\xff",
    )
    header = parse(content)
    assert list(header.tensors) == ["b", "empty"] and header.metadata == {"format": "pt"}
    span = header.tensors["b"]
    assert (span.dtype, span.shape, content[span.start : span.stop]) == ("F8_E8M0", (3,), b"\0\x7f\xff")
    assert header.tensors["empty"].size_bytes == 0
    assert {name for name, _ in deserialize(content)} == {"b", "empty"}
    assert parse(file_bytes(b"{}      ", b"")).tensors == {}


def test_every_dtype_of_the_library() -> None:
    for dtype, bits in DTYPE_BITS.items():
        content = file_bytes({"a": entry(dtype, (8,), (0, bits))}, b"\0" * bits)
        assert parse(content).tensors["a"].dtype == dtype
        deserialize(content)


small = st.integers(0, 9)
entries = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["U8", "F16", "F4", "X", 3]),
            "shape": st.lists(st.one_of(small, st.just(2**62), st.just(-1), st.just(1.5)), max_size=3),
            "data_offsets": st.lists(small, min_size=1, max_size=3),
        }
    ),
    max_size=3,
)


@given(
    header=entries, data=st.binary(max_size=9), noise=st.none() | st.tuples(st.integers(0, 200), st.integers(0, 255))
)
@settings(max_examples=400, deadline=None)
def test_never_more_lenient_than_the_library(header: object, data: bytes, noise: tuple[int, int] | None) -> None:
    content = bytearray(file_bytes(header, data))
    if noise is not None:
        content[noise[0] % len(content)] = noise[1]
    try:
        ours = parse(bytes(content))
    except HeaderError:
        return
    theirs = dict(deserialize(bytes(content)))
    assert {name: (span.dtype, list(span.shape)) for name, span in ours.tensors.items()} == {
        name: (tensor["dtype"], tensor["shape"]) for name, tensor in theirs.items()
    }
    for name, span in ours.tensors.items():
        assert bytes(content[span.start : span.stop]) == bytes(theirs[name]["data"])
