"""Reads format, size and frame count from an image's header without decoding; knows no limits and no image library.

The point of a second reader beside the decoder is that nothing is allocated for a picture before its size is known:
some decoders reserve the whole canvas when a file is merely opened.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_STANDALONE_MARKERS = {0x01, *range(0xD0, 0xD9)}
_JPEG_FRAME_MARKERS = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Inside entropy-coded data only restart markers and stuffed zeros follow an FF.
_JPEG_NEXT_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd7\xff])", re.DOTALL)
_MAX_COUNTED_SCANS = 1000
_TIFF_WIDTH_TAG, _TIFF_HEIGHT_TAG = 256, 257
_TIFF_SHORT, _TIFF_LONG = 3, 4


class HeaderError(ValueError):
    """The bytes are no readable header of an accepted format; the message says why."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header claims. `format` is the decoder's name for it; sizes are in pixels as stored, not yet rotated.

    `frames` counts pictures shown one after the other (animation frames, TIFF pages). Where frames must be
    counted one by one, counting stops one past the limit given to `read_header`. Auxiliary pictures inside a JPEG
    (depth maps, gain maps, stereo halves) are not frames. `scans` counts the passes of a progressive JPEG over the
    picture, up to 1000; it is 1 for the other formats.
    """

    format: str
    width: int
    height: int
    frames: int
    scans: int = 1


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    """Finds format, size and frames of `data`.

    Raises HeaderError when the content is none of PNG, JPEG, WebP, GIF, BMP, TIFF or its header is cut or senseless.
    """
    if not data:
        raise HeaderError("it has no bytes")
    for matches, read in _READERS:
        if matches(data):
            try:
                header = read(data, max_frames)
            except (struct.error, IndexError):
                raise HeaderError("its header is cut short") from None
            if header.width < 1 or header.height < 1:
                raise HeaderError(f"its header gives a size of {header.width}x{header.height}")
            return header
    raise HeaderError(f"it is none of PNG, JPEG, WebP, GIF, BMP, TIFF (first bytes: {data[:8].hex(' ')})")


def _read_png(data: bytes, max_frames: int) -> ImageHeader:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise HeaderError("its first PNG chunk is not IHDR")
    frames = 1
    offset = 8
    while offset + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"IDAT":
            break
        if kind == b"acTL":
            frames = max(1, struct.unpack_from(">I", data, offset + 8)[0])
        offset += 12 + length
    return ImageHeader("PNG", width, height, frames)


def _read_jpeg(data: bytes, max_frames: int) -> ImageHeader:
    offset = 2
    while True:
        if data[offset] != 0xFF:
            raise HeaderError("a JPEG marker is missing before the picture's size")
        while data[offset] == 0xFF:
            offset += 1
        marker = data[offset]
        offset += 1
        if marker in _JPEG_STANDALONE_MARKERS:
            continue
        (length,) = struct.unpack_from(">H", data, offset)
        if marker in _JPEG_FRAME_MARKERS:
            height, width = struct.unpack_from(">HH", data, offset + 3)
            return ImageHeader("JPEG", width, height, 1, _count_jpeg_scans(data, offset + length))
        if marker in (0xD9, 0xDA) or length < 2:
            raise HeaderError("its JPEG data begin before the picture's size")
        offset += length


def _count_jpeg_scans(data: bytes, offset: int) -> int:
    """Scans from `offset` to the end of this picture; a cut file has as many as are there."""
    scans = 0
    while scans < _MAX_COUNTED_SCANS and (found := _JPEG_NEXT_MARKER.search(data, offset)):
        marker = found[1][0]
        if marker == 0xD9:
            break
        scans += marker == 0xDA
        offset = found.end() + max(2, int.from_bytes(data[found.end() : found.end() + 2], "big"))
    return max(scans, 1)


def _read_gif(data: bytes, max_frames: int) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + _gif_table_bytes(flags)
    frames = 0
    while frames <= max_frames and offset < len(data):
        block = data[offset]
        if block == 0x21:
            offset += 2
        elif block == 0x2C:
            frames += 1
            if offset + 9 >= len(data):
                break
            offset += 11 + _gif_table_bytes(data[offset + 9])
        else:
            break
        while offset < len(data) and data[offset] != 0:
            offset += 1 + data[offset]
        offset += 1
    return ImageHeader("GIF", width, height, max(frames, 1))


def _gif_table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _read_webp(data: bytes, max_frames: int) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise HeaderError("its VP8 key frame has no start code")
        width, height = (value & 0x3FFF for value in struct.unpack_from("<HH", data, 26))
        return ImageHeader("WEBP", width, height, 1)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1)
    if kind != b"VP8X":
        raise HeaderError("its first WebP chunk is none of VP8, VP8L, VP8X")
    if len(data) < 30:
        raise HeaderError("its header is cut short")
    width = int.from_bytes(data[24:27], "little") + 1
    height = int.from_bytes(data[27:30], "little") + 1
    frames = 0
    offset = 12
    while frames <= max_frames and offset + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, offset)
        frames += kind == b"ANMF"
        offset += 8 + length + (length & 1)
    return ImageHeader("WEBP", width, height, max(frames, 1))


def _read_bmp(data: bytes, max_frames: int) -> ImageHeader:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        # A negative height means rows from top to bottom.
        width, height = struct.unpack_from("<ii", data, 18)
        height = abs(height)
    return ImageHeader("BMP", width, height, 1)


def _read_tiff(data: bytes, max_frames: int) -> ImageHeader:
    order = "<" if data[:2] == b"II" else ">"
    (offset,) = struct.unpack_from(order + "I", data, 4)
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    while offset and offset not in seen and len(seen) <= max_frames:
        (entries,) = struct.unpack_from(order + "H", data, offset)
        if not seen:
            for entry in range(offset + 2, offset + 2 + 12 * entries, 12):
                tag, kind, _count = struct.unpack_from(order + "HHI", data, entry)
                if tag in (_TIFF_WIDTH_TAG, _TIFF_HEIGHT_TAG):
                    if kind not in (_TIFF_SHORT, _TIFF_LONG):
                        raise HeaderError(f"its TIFF size tag has type {kind}")
                    (sizes[tag],) = struct.unpack_from(order + ("H" if kind == _TIFF_SHORT else "I"), data, entry + 8)
        seen.add(offset)
        (offset,) = struct.unpack_from(order + "I", data, offset + 2 + 12 * entries)
    return ImageHeader("TIFF", sizes.get(_TIFF_WIDTH_TAG, 0), sizes.get(_TIFF_HEIGHT_TAG, 0), max(len(seen), 1))


_READERS = (
    (lambda data: data.startswith(_PNG_SIGNATURE), _read_png),
    (lambda data: data.startswith(b"\xff\xd8\xff"), _read_jpeg),
    (lambda data: data.startswith((b"GIF87a", b"GIF89a")), _read_gif),
    (lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", _read_webp),
    (lambda data: data.startswith(b"BM"), _read_bmp),
    (lambda data: data.startswith((b"II*\x00", b"MM\x00*")), _read_tiff),
)
