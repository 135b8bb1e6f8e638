"""Turns encoded bytes into one RGB picture, the same way for every caller; knows no model and no service.

`decode` is the only place where image bytes become pixels. Its rules, in order:

1. Bytes, pixels, frames, aspect ratio and JPEG scans are limited by what the file claims, before any pixel is decoded.
2. The whole picture is decoded at once, so damage shows here and nowhere later.
3. A file with more frames than allowed is refused; where several are allowed, the first one is the picture.
4. Anything transparent is laid over the configured background: colour under alpha 0 is never visible to a person.
5. Grey with more than 8 bits is scaled to 8 bits, never clipped.
6. The EXIF orientation is applied last, so width and height are those a person sees.

A picture is never refused for being small: the processor enlarges it to its own minimum.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image

from svc_common.errors import InvalidArgument, ResourceExhausted
from vision_svc.header import HeaderError, read_header

# Our own limit comes first and is read from our own reading of the header; the library's guard would only turn a
# limit configured above it into a second, different refusal.
Image.MAX_IMAGE_PIXELS = None

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_GREY_16_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_UINT16_MAX = 65535
# Each scan goes over the whole picture but may take less than 100 bytes of file, so they are cheap to send and dear to
# decode. Encoders write about 10, the most thorough optimisers about 20.
_MAX_JPEG_SCANS = 32


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """Limits and choices of `decode`; all of them enter the digest of an image.

    `max_aspect_ratio` is the longer side divided by the shorter one. `background` is (red, green, blue), 0 to 255.
    """

    max_image_bytes: int
    max_image_pixels: int
    max_frames: int
    max_aspect_ratio: float
    background: tuple[int, int, int]


def check_bytes(size_bytes: int, rules: DecodeRules) -> None:
    """Raises ResourceExhausted when an image of `size_bytes` is too large, before its content is looked at."""
    if size_bytes > rules.max_image_bytes:
        raise _too_large("max_image_bytes", "bytes", rules.max_image_bytes, size_bytes)


def decode(data: bytes, rules: DecodeRules) -> Image.Image:
    """Decodes `data` into an RGB picture.

    Raises InvalidArgument for content that is no acceptable picture and ResourceExhausted for one above a size limit.
    """
    check_bytes(len(data), rules)
    try:
        header = read_header(data, rules.max_frames)
    except HeaderError as error:
        raise _refused(str(error), reason="IMAGE_UNREADABLE") from None
    _check_size(header.width, header.height, rules)
    if header.frames > rules.max_frames:
        raise _refused(
            f"it has at least {header.frames} frames, max_frames is {rules.max_frames}",
            reason="IMAGE_FRAMES",
            limit=rules.max_frames,
            value=header.frames,
        )
    if header.scans > _MAX_JPEG_SCANS:
        raise _refused(
            f"it has at least {header.scans} JPEG scans, the limit is {_MAX_JPEG_SCANS}",
            reason="IMAGE_SCANS",
            limit=_MAX_JPEG_SCANS,
            value=header.scans,
        )
    try:
        image = Image.open(io.BytesIO(data), formats=[header.format])
        # A frame may enlarge the canvas that the header gave.
        _check_size(image.width, image.height, rules)
        image.load()
        return _upright(_as_rgb(image, rules.background), _orientation(image))
    except (InvalidArgument, ResourceExhausted, MemoryError):
        raise
    except Exception as error:
        # Whatever else the decoder raises on these bytes is about these bytes: struct, zlib and index errors included.
        raise _refused(
            f"its {header.format} content cannot be decoded: {error or type(error).__name__}", reason="IMAGE_CORRUPT"
        ) from error


def _check_size(width: int, height: int, rules: DecodeRules) -> None:
    if width * height > rules.max_image_pixels:
        raise _too_large("max_image_pixels", "pixels", rules.max_image_pixels, width * height, f" ({width}x{height})")
    ratio = max(width, height) / min(width, height)
    if ratio > rules.max_aspect_ratio:
        raise _refused(
            f"its aspect ratio is {ratio:g} ({width}x{height}), max_aspect_ratio is {rules.max_aspect_ratio:g}",
            reason="IMAGE_ASPECT_RATIO",
            limit=rules.max_aspect_ratio,
            value=ratio,
        )


def _as_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """RGB pixels of a loaded picture of any mode, over `background` where it is transparent."""
    if image.mode in _GREY_16_BIT or image.mode == "I":
        return _grey_to_rgb(image, background)
    if image.mode == "F":
        raise _refused("its pixels are floating-point numbers, which have no agreed range", reason="IMAGE_MODE")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    canvas = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")


def _grey_to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Scales grey of 16 bits (also when stored in 32) to 8, rounding to the nearest."""
    grey = np.asarray(image).astype(np.int64)
    least, most = int(grey.min()), int(grey.max())
    if least < 0 or most > _UINT16_MAX:
        value = least if least < 0 else most
        raise _refused(
            f"its grey values leave the range 0..{_UINT16_MAX}: {value}",
            reason="IMAGE_MODE",
            limit=_UINT16_MAX,
            value=value,
        )
    scaled = ((grey * 255 + _UINT16_MAX // 2) // _UINT16_MAX).astype(np.uint8)
    rgb = np.repeat(scaled[:, :, None], 3, axis=2)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        rgb[grey == transparent] = background
    return Image.fromarray(rgb)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8. A block nobody can read says nothing about orientation, as in every browser."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    method = _TRANSPOSE.get(orientation)
    return image if method is None else image.transpose(method)


def _refused(why: str, *, reason: str, limit: float | None = None, value: float | None = None) -> InvalidArgument:
    return InvalidArgument(why, field="data", limit=limit, value=value, reason=reason)


def _too_large(setting: str, unit: str, limit: int, value: int, detail: str = "") -> ResourceExhausted:
    return ResourceExhausted(
        f"it has {value} {unit}{detail}, {setting} is {limit}",
        field="data",
        limit=limit,
        value=value,
        reason="IMAGE_TOO_LARGE",
    )
