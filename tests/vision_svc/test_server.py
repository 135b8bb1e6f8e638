"""One image at a time on a real service: upstream's numbers, damaged and hostile images, the cache."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Glm5NextForConditionalGeneration, Glm5NextImageProcessorPil

from protos.common.v1 import common_pb2
from svc_common.errors import error_from_rpc
from tests.vision_svc.client import Bytes, Gate, ServeVision, noise, refusal

# Right numbers.


async def test_stream_carries_upstreams_features(
    serve_vision: ServeVision, tiny_checkpoint: Path, image_bytes: Bytes
) -> None:
    client = await serve_vision()
    model = Glm5NextForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    processor = Glm5NextImageProcessorPil.from_pretrained(tiny_checkpoint)
    for name in ("gray.jpg", "cmyk.jpg", "exif_1.jpg", "size_332x27.png"):
        data = image_bytes(name)
        inputs = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")
        with torch.inference_mode():
            (right,) = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        encoded = await client.encode(data)
        header = encoded.header
        assert np.array_equal(encoded.rows, right.numpy()), name
        assert [[header.grid_frames, header.grid_height, header.grid_width]] == inputs["image_grid_thw"].tolist()
        assert (header.hidden, header.dtype) == (64, common_pb2.DTYPE_FLOAT32)


async def test_same_bits_alone_and_among_others(serve_vision: ServeVision) -> None:
    client = await serve_vision(cache_bytes=0, batch_wait_ms=200)
    alone = await client.encode(noise(0))
    among = await asyncio.gather(
        *(client.encode(noise(seed, (20 + 9 * seed, 60))) for seed in range(1, 8)), client.encode(noise(0))
    )
    assert among[-1].data == alone.data
    assert among[-1].header.digest == alone.header.digest


# Cases 1, 3, 4, 6 and the colour kinds: the token count or the tokens that the right picture has.


async def test_hidden_red_is_white(serve_vision: ServeVision, image_bytes: Bytes) -> None:
    client = await serve_vision()
    flat = Image.new("RGB", (64, 64), (255, 255, 255))
    seen = Image.open(io.BytesIO(image_bytes("rgba_hidden_red.png")))
    flat.paste(seen, mask=seen.getchannel("A"))
    out = io.BytesIO()
    flat.save(out, "PNG")
    assert (await client.encode(image_bytes("rgba_hidden_red.png"))).data == (await client.encode(out.getvalue())).data


async def test_background_changes_tokens_and_digest(serve_vision: ServeVision, image_bytes: Bytes) -> None:
    data = image_bytes("rgba_hidden_red.png")
    white = await (await serve_vision()).encode(data)
    black = await (await serve_vision(background=(0, 0, 0))).encode(data)
    assert white.header.digest != black.header.digest
    assert white.data != black.data


async def test_exif_is_applied_before_measuring(serve_vision: ServeVision, image_bytes: Bytes) -> None:
    client = await serve_vision()
    headers = [(await client.encode(image_bytes(f"exif_{number}.jpg"))).header for number in range(1, 9)]
    assert {(header.grid_height, header.grid_width, header.tokens) for header in headers} == {(6, 8, 12)}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("size_1x1.png", 4), ("size_2x2.png", 4), ("size_27x257.png", 10), ("size_332x27.png", 12),
        ("size_1x200.png", 8), ("gray.jpg", 4), ("cmyk.jpg", 4),
    ],
)  # fmt: skip
async def test_small_and_odd_pictures_have_tokens(
    serve_vision: ServeVision, image_bytes: Bytes, name: str, tokens: int
) -> None:
    encoded = await (await serve_vision()).encode(image_bytes(name))
    assert encoded.header.tokens == encoded.trailer.tokens == tokens
    assert np.isfinite(encoded.rows).all()


# Cases 8, 9, 17 and animation: the right status, with the image, field, limit and value; then the next request works.


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("truncated.jpg", "INVALID_ARGUMENT", "JPEG content cannot be decoded"),
        ("truncated.png", "INVALID_ARGUMENT", "PNG content cannot be decoded"),
        ("bad_crc.png", "INVALID_ARGUMENT", "PNG content cannot be decoded"),
        ("garbage.jpg", "INVALID_ARGUMENT", "none of PNG, JPEG"),
        ("html_as.png", "INVALID_ARGUMENT", "none of PNG, JPEG"),
        ("empty.bin", "INVALID_ARGUMENT", "no bytes"),
        ("animated.png", "INVALID_ARGUMENT", "at least 3 frames, max_frames is 1"),
        ("bomb_20000.png", "RESOURCE_EXHAUSTED", "400000000 pixels (20000x20000), max_image_pixels is 50000000"),
        ("header_lie_60000.png", "RESOURCE_EXHAUSTED", "3600000000 pixels (60000x60000), max_image_pixels is 50000000"),
        ("bomb_9000_under_pillow_warning.png", "RESOURCE_EXHAUSTED", "81000000 pixels (9000x9000)"),
    ],
)
async def test_bad_image(serve_vision: ServeVision, image_bytes: Bytes, name: str, status: str, says: str) -> None:
    client = await serve_vision()
    error = await refusal(client, image_bytes(name), f"#2 {name}")
    assert error.code().name == status
    assert error.details().startswith(f"image '#2 {name}': ") and says in error.details()
    assert error_from_rpc(error).field == "data"
    assert (await client.encode(image_bytes("gray.jpg"))).header.tokens == 4
    await client.until_idle()
    assert f'day0_request_failure_total{{status="{status}"}} 1.0' in client.launcher.metrics.text()


async def test_image_bytes_limit(serve_vision: ServeVision) -> None:
    client = await serve_vision(max_image_bytes=1000)
    error = await refusal(client, noise(1))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == f"image: data: it has {len(noise(1))} bytes, max_image_bytes is 1000"


# Case 40.
async def test_message_above_the_limit(serve_vision: ServeVision) -> None:
    client = await serve_vision(max_message_bytes=1024**2, max_image_bytes=512 * 1024)
    error = await refusal(client, bytes(1024**2))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(1024**2) in error.details()
    assert (await client.encode(noise(1))).header.tokens


# Case 40.
async def test_five_megabytes_pass(serve_vision: ServeVision) -> None:
    data = noise(1, (1400, 1250))
    assert len(data) > 5_000_000
    assert (await (await serve_vision()).encode(data)).header.tokens > 0


# Case 17.
async def test_image_above_the_patch_budget(serve_vision: ServeVision, image_bytes: Bytes) -> None:
    client = await serve_vision(patch_budget=16)
    error = await refusal(client, image_bytes("exif_1.jpg"), "big")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "image 'big'" in error.details() and "48 patches, patch_budget is 16" in error.details()
    small = [image_bytes(name) for name in ("size_1x1.png", "size_2x2.png", "gray.jpg")]
    async with asyncio.timeout(10):
        await asyncio.gather(*(client.encode(data) for data in small))
        await client.until_idle()


# Cache and coalescing.


async def test_second_time_comes_from_the_cache(serve_vision: ServeVision) -> None:
    client = await serve_vision()
    first = await client.encode(noise(1))
    second = await client.encode(noise(1), label="another label")
    assert (first.trailer.cached, second.trailer.cached) == (False, True)
    assert second.data == first.data and second.header == first.header
    load = await client.until_idle()
    assert (load.cached_images, load.cached_bytes) == (1, len(first.data))
    text = client.launcher.metrics.text()
    assert "day0_encode_cache_hits_total 1.0" in text
    assert f"day0_visual_tokens_total {2.0 * first.header.tokens}" in text
    assert "day0_encode_seconds_count 1.0" in text


async def test_least_recently_used_image_is_forgotten(serve_vision: ServeVision) -> None:
    size = len((await (await serve_vision()).encode(noise(1))).data)
    client = await serve_vision(cache_bytes=2 * size)
    for seed in (1, 2, 1, 3):
        await client.encode(noise(seed))
    assert (await client.encode(noise(1))).trailer.cached
    assert not (await client.encode(noise(2))).trailer.cached


async def test_identical_images_in_flight_are_encoded_once(serve_vision: ServeVision) -> None:
    client = await serve_vision(cache_bytes=0)
    gate = Gate(client)
    streams = [asyncio.create_task(client.encode(noise(1))) for _ in range(6)]
    await client.until(lambda load: load.running_images == 1 and load.open_streams == 6)
    gate.open.set()
    results = await asyncio.gather(*streams)
    assert len({result.data for result in results}) == 1
    assert gate.batches == [1]


async def test_identical_bad_images_each_hear_their_own_label(serve_vision: ServeVision, image_bytes: Bytes) -> None:
    client = await serve_vision()
    data = image_bytes("bad_crc.png")
    errors = await asyncio.gather(*(refusal(client, data, f"copy {number}") for number in range(5)))
    for number, error in enumerate(errors):
        assert error.details().startswith(f"image 'copy {number}': ")
