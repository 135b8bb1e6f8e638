"""The header reader agrees with the decoder on real files and never fails otherwise than by HeaderError."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vision_svc.header import HeaderError, read_header


def saved(
    format: str, size: tuple[int, int] = (37, 53), mode: str = "RGB", frames: int = 1, **options: object
) -> bytes:
    pictures = [
        Image.new(mode, size, (40 * number, 9, 7) if mode == "RGB" else 40 * number) for number in range(frames)
    ]
    out = io.BytesIO()
    if frames > 1:
        options |= {"save_all": True, "append_images": pictures[1:]}
    pictures[0].save(out, format, **options)
    return out.getvalue()


STILL = {
    "PNG": saved("PNG"),
    "JPEG": saved("JPEG"),
    "JPEG progressive": saved("JPEG", progressive=True),
    "GIF": saved("GIF", mode="P"),
    "BMP": saved("BMP"),
    "TIFF": saved("TIFF"),
    "TIFF big-endian": saved("TIFF", mode="I;16B"),
    "WEBP": saved("WEBP"),
    "WEBP lossless": saved("WEBP", lossless=True),
    "WEBP extended": saved("WEBP", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00"),
}
MANY = {
    "PNG": saved("PNG", frames=3),
    "GIF": saved("GIF", mode="L", frames=3),
    "WEBP": saved("WEBP", frames=3),
    "TIFF": saved("TIFF", frames=3),
}


@pytest.mark.parametrize("kind", STILL)
def test_size_and_format_of_a_still_picture(kind: str) -> None:
    header = read_header(STILL[kind], max_frames=1)
    assert (header.format, header.width, header.height, header.frames) == (kind.split(maxsplit=1)[0], 37, 53, 1)


@pytest.mark.parametrize("kind", MANY)
def test_frames_are_counted(kind: str) -> None:
    assert read_header(MANY[kind], max_frames=10).frames == 3
    assert read_header(MANY[kind], max_frames=1).frames > 1


def test_counting_stops_past_the_limit() -> None:
    assert read_header(MANY["GIF"], max_frames=1).frames == 2


def test_second_picture_inside_a_jpeg_is_no_frame() -> None:
    assert read_header(saved("MPO", frames=2), max_frames=1).frames == 1


def test_bmp_from_top_to_bottom() -> None:
    data = bytearray(STILL["BMP"])
    data[22:26] = struct.pack("<i", -53)
    assert read_header(bytes(data), max_frames=1).height == 53


def test_tiff_whose_pages_form_a_ring_ends() -> None:
    # One page without entries whose next page is itself.
    data = b"II*\x00" + struct.pack("<I", 8) + struct.pack("<HI", 0, 8)
    with pytest.raises(HeaderError, match="size of 0x0"):
        read_header(data, max_frames=1000)


@pytest.mark.parametrize("name", ["garbage.jpg", "html_as.png"])
def test_content_decides_not_the_name(image_bytes: Callable[[str], bytes], name: str) -> None:
    with pytest.raises(HeaderError, match="none of PNG, JPEG, WebP, GIF, BMP, TIFF"):
        read_header(image_bytes(name), max_frames=1)


def test_no_bytes() -> None:
    with pytest.raises(HeaderError, match="no bytes"):
        read_header(b"", max_frames=1)


def test_zero_size() -> None:
    data = bytearray(STILL["PNG"])
    data[16:20] = bytes(4)
    with pytest.raises(HeaderError, match="size of 0x53"):
        read_header(bytes(data), max_frames=1)


@pytest.mark.parametrize("kind", [*STILL, *(f"{kind} frames" for kind in MANY)])
def test_any_cut_is_a_header_error_or_a_size(kind: str) -> None:
    data = MANY[kind.removesuffix(" frames")] if kind.endswith("frames") else STILL[kind]
    for length in range(min(len(data), 400)):
        with contextlib.suppress(HeaderError):
            assert read_header(data[:length], max_frames=5).width == 37


@given(st.sampled_from([*STILL.values(), *MANY.values()]), st.data())
def test_any_damage_is_a_header_error_or_a_positive_size(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 6))):
        damaged[draw.draw(st.integers(0, min(len(data), 300) - 1))] = draw.draw(st.integers(0, 255))
    try:
        header = read_header(bytes(damaged), max_frames=5)
    except HeaderError:
        return
    assert header.width > 0 and header.height > 0 and header.frames > 0
