"""Every rule of the one decode function, with the picture a person would see as the right answer."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from svc_common.errors import InvalidArgument, ResourceExhausted
from vision_svc.decode import DecodeRules, decode

Bytes = Callable[[str], bytes]

RULES = DecodeRules(
    max_image_bytes=20 * 1024**2,
    max_image_pixels=50_000_000,
    max_frames=1,
    max_aspect_ratio=200,
    background=(255, 255, 255),
)


def saved(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def png(width: int, height: int, bits: int, colour: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG from its chunks, for what Pillow does not write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*pair) for pair in chunks)


def pixels(data: bytes, rules: DecodeRules = RULES) -> np.ndarray:
    image = decode(data, rules)
    assert image.mode == "RGB"
    return np.asarray(image)


# Case 1: transparency.


def test_colour_under_alpha_zero_is_not_seen(image_bytes: Bytes) -> None:
    seen = pixels(image_bytes("rgba_hidden_red.png"))
    assert seen.shape == (64, 64, 3)
    assert tuple(seen[0, 0]) == (255, 255, 255)
    assert tuple(seen[32, 32]) == (0, 0, 255)
    assert not ((seen[..., 0] == 255) & (seen[..., 1] == 0)).any(), "hidden red shows"


def test_background_is_the_configured_one(image_bytes: Bytes) -> None:
    rules = dataclasses.replace(RULES, background=(10, 20, 30))
    assert tuple(pixels(image_bytes("rgba_hidden_red.png"), rules)[0, 0]) == (10, 20, 30)


def test_half_transparent_mixes() -> None:
    seen = pixels(saved(Image.new("RGBA", (4, 4), (0, 0, 0, 128))))
    assert tuple(seen[0, 0]) == (127, 127, 127)


def test_grey_with_alpha() -> None:
    seen = pixels(saved(Image.new("LA", (4, 4), (7, 0))))
    assert tuple(seen[0, 0]) == (255, 255, 255)


def palette(transparent: int) -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    image.info["transparency"] = transparent
    return image


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_palette_with_a_transparent_entry(format: str) -> None:
    seen = pixels(saved(palette(0), format, transparency=0))
    assert [tuple(pixel) for pixel in seen[0]] == [(255, 255, 255), (0, 0, 255)]


@pytest.mark.parametrize(
    ("colour", "rows", "key", "right"),
    [
        (0, b"\x00\x07\x08", struct.pack(">H", 7), [(255, 255, 255), (8, 8, 8)]),
        (2, b"\x00\x01\x02\x03\x09\x09\x09", struct.pack(">HHH", 1, 2, 3), [(255, 255, 255), (9, 9, 9)]),
    ],
)
def test_colour_key_of_grey_and_rgb(colour: int, rows: bytes, key: bytes, right: list[tuple[int, ...]]) -> None:
    seen = pixels(png(2, 1, 8, colour, rows, (b"tRNS", key)))
    assert [tuple(pixel) for pixel in seen[0]] == right


def test_colour_key_of_16_bit_grey() -> None:
    rows = b"\x00" + struct.pack(">HH", 300, 65535)
    seen = pixels(
        png(2, 1, 16, 0, rows, (b"tRNS", struct.pack(">H", 300))), dataclasses.replace(RULES, background=(1, 2, 3))
    )
    assert [tuple(pixel) for pixel in seen[0]] == [(1, 2, 3), (255, 255, 255)]


# Colour kinds.


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(format: str) -> None:
    grey = np.array([[0, 128, 257, 32768, 65279, 65535]], np.uint16)
    seen = pixels(saved(Image.fromarray(grey), format))
    assert seen[0, :, 0].tolist() == [0, 0, 1, 128, 254, 255]
    assert (seen == seen[..., :1]).all()


def test_big_endian_16_bit_grey() -> None:
    seen = pixels(saved(Image.new("I;16B", (2, 2), 32768), "TIFF"))
    assert seen[0, 0].tolist() == [128, 128, 128]


def test_grey_in_32_bits_is_read_as_16() -> None:
    assert pixels(saved(Image.new("I", (2, 2), 65535), "TIFF"))[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("value", [65536, -1])
def test_grey_beyond_16_bits_is_refused(value: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"65535.*{value}"):
        decode(saved(Image.new("I", (2, 2), value), "TIFF"), RULES)


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="floating-point"):
        decode(saved(Image.new("F", (2, 2), 0.5), "TIFF"), RULES)


def test_16_bit_rgb_keeps_its_high_bytes() -> None:
    rows = b"\x00" + struct.pack(">HHH", 0x8012, 0x40FF, 0xFFFF)
    assert pixels(png(1, 1, 16, 2, rows))[0, 0].tolist() == [0x80, 0x40, 0xFF]


def test_one_bit() -> None:
    assert pixels(png(2, 1, 1, 0, b"\x00\x40"))[0].tolist() == [[0, 0, 0], [255, 255, 255]]


def test_grey_jpeg(image_bytes: Bytes) -> None:
    assert pixels(image_bytes("gray.jpg"))[5, 5].tolist() == [128, 128, 128]


def test_adobe_cmyk_jpeg_is_not_inverted(image_bytes: Bytes) -> None:
    # Cyan 0, magenta and yellow full, no black.
    assert pixels(image_bytes("cmyk.jpg"))[5, 5].tolist() == [255, 0, 0]


def test_plain_cmyk() -> None:
    assert pixels(saved(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "TIFF"))[0, 0].tolist() == [0, 255, 255]


# Case 3: EXIF orientation.


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(image_bytes: Bytes, orientation: int) -> None:
    seen = pixels(image_bytes(f"exif_{orientation}.jpg")).astype(int)
    assert seen.shape == (64, 96, 3), "red bar on top of a picture 96 wide and 64 high"
    top, left, middle = seen[3, 60], seen[40, 3], seen[40, 60]
    assert top[0] > 180 and top[1] < 80 and top[2] < 80, top
    assert left[1] > 90 and left[0] < 80 and left[2] < 80, left
    assert abs(middle - top).max() > 60 and abs(middle - left).max() > 60


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_exif_orientation_of_other_formats_applies_once(format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGB", (4, 2), (0, 0, 255))
    for x in range(2):
        for y in range(2):
            image.putpixel((x, y), (255, 0, 0))
    options = {"lossless": True} if format == "WEBP" else {}
    seen = pixels(saved(image, format, exif=exif.tobytes() if format != "TIFF" else exif, **options))
    assert seen.shape == (4, 2, 3)
    # A quarter turn clockwise brings the left half to the top.
    assert seen[0, 0].tolist() == [255, 0, 0] and seen[3, 0].tolist() == [0, 0, 255]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\x00\x00garbage", b"Exif\x00\x00II*\x00\xff\xff\xff\xff", b"Exif\x00\x00"])
def test_unreadable_exif_says_nothing(exif: bytes) -> None:
    assert pixels(saved(Image.new("RGB", (4, 2)), "JPEG", exif=exif)).shape == (2, 4, 3)


# Case 6: small pictures are not this function's business.


@pytest.mark.parametrize(("name", "size"), [("size_1x1", (1, 1)), ("size_2x2", (2, 2)), ("size_1x200", (1, 200))])
def test_small_pictures_are_decoded(image_bytes: Bytes, name: str, size: tuple[int, int]) -> None:
    assert decode(image_bytes(f"{name}.png"), RULES).size == size


# Case 8: damage.


@pytest.mark.parametrize(
    "name", ["truncated.jpg", "truncated.png", "bad_crc.png", "garbage.jpg", "html_as.png", "empty.bin"]
)
def test_damage_is_the_callers_fault(image_bytes: Bytes, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(image_bytes(name), RULES)
    assert caught.value.field == "data" and caught.value.reason in ("IMAGE_UNREADABLE", "IMAGE_CORRUPT")


SEEDS = [
    saved(Image.effect_noise((24, 24), 60).convert("RGB"), format, **options)
    for format, options in [("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("BMP", {}), ("TIFF", {"compression": "tiff_lzw"})]
] + [saved(Image.effect_noise((24, 24), 60), "GIF")]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SEEDS), st.data())
def test_any_damage_ends_in_a_picture_or_a_status(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data[: draw.draw(st.integers(1, len(data)))])
    for _ in range(draw.draw(st.integers(0, 8))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidArgument, ResourceExhausted):
        assert decode(bytes(damaged), RULES).mode == "RGB"


# Case 9: bombs, and the other limits.


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bomb_20000.png", 400_000_000),
        ("header_lie_60000.png", 3_600_000_000),
        ("bomb_9000_under_pillow_warning.png", 81_000_000),
    ],
)
def test_bomb_is_refused_from_its_header(
    image_bytes: Bytes, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    monkeypatch.setattr(Image, "open", lambda *_args, **_options: pytest.fail("the image library saw the bomb"))
    with pytest.raises(ResourceExhausted, match=rf"{count} pixels.*max_image_pixels is 50000000") as caught:
        decode(image_bytes(name), RULES)
    assert (caught.value.limit, caught.value.value) == (50_000_000, count)


def test_our_limit_is_the_only_one() -> None:
    # More pixels than the library's own guard lets through, and no content: only the missing content is at fault.
    with pytest.raises(InvalidArgument, match=r"truncated|broken"):
        decode(png(20_000, 10_000, 1, 0, b""), dataclasses.replace(RULES, max_image_pixels=200_000_000))


def test_bytes_limit() -> None:
    data = saved(Image.new("RGB", (8, 8)))
    rules = dataclasses.replace(RULES, max_image_bytes=len(data) - 1)
    with pytest.raises(ResourceExhausted, match=f"{len(data)} bytes, max_image_bytes is {len(data) - 1}"):
        decode(data, rules)
    assert decode(data, dataclasses.replace(RULES, max_image_bytes=len(data))).size == (8, 8)


def test_pixel_limit_is_inclusive() -> None:
    data = saved(Image.new("RGB", (10, 10)))
    assert decode(data, dataclasses.replace(RULES, max_image_pixels=100)).size == (10, 10)
    with pytest.raises(ResourceExhausted, match="100 pixels"):
        decode(data, dataclasses.replace(RULES, max_image_pixels=99))


def test_gif_frame_that_enlarges_the_canvas_is_measured_again() -> None:
    data = bytearray(saved(Image.new("L", (100, 100)), "GIF"))
    data[6:10] = struct.pack("<HH", 1, 1)
    with pytest.raises(ResourceExhausted, match=r"10000 pixels \(100x100\)"):
        decode(bytes(data), dataclasses.replace(RULES, max_image_pixels=5000))


def test_aspect_ratio_limit_is_inclusive() -> None:
    assert decode(saved(Image.new("RGB", (200, 1))), RULES).size == (200, 1)
    for size in ((201, 1), (1, 201)):
        with pytest.raises(InvalidArgument, match=r"aspect ratio is 201.*max_aspect_ratio is 200"):
            decode(saved(Image.new("RGB", size)), RULES)


def test_animation_is_refused_by_its_frames(image_bytes: Bytes) -> None:
    with pytest.raises(InvalidArgument, match="at least 3 frames, max_frames is 1") as caught:
        decode(image_bytes("animated.png"), RULES)
    assert (caught.value.limit, caught.value.value) == (1, 3)


def test_first_frame_is_the_picture_where_frames_are_allowed(image_bytes: Bytes) -> None:
    seen = pixels(image_bytes("animated.png"), dataclasses.replace(RULES, max_frames=3))
    assert (seen == (255, 0, 0)).all()


def test_jpeg_of_very_many_scans_is_refused() -> None:
    data = saved(Image.effect_noise((64, 64), 80), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    many = data[:last] + data[last:-2] * 40 + b"\xff\xd9"
    assert decode(data, RULES).size == (64, 64)
    with pytest.raises(InvalidArgument, match="JPEG scans, the limit is 32"):
        decode(many, RULES)
    # What follows the picture's end, such as a motion photo's video, is not counted.
    assert decode(data + b"\x00\x02" + data[last:-2] * 40, RULES).size == (64, 64)


def test_formats_outside_the_list_are_refused() -> None:
    for format in ("PPM", "TGA", "ICO", "PDF"):
        with pytest.raises(InvalidArgument, match="none of PNG, JPEG, WebP, GIF, BMP, TIFF"):
            decode(saved(Image.new("RGB", (16, 16)), format), RULES)
