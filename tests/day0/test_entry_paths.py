"""Every way a picture comes in ends at the same bytes and the same decoder: equal pixels, whatever the way."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from day0.chat import image_parts
from day0.client import chat_request, image_part
from router_svc.fetch import Fetcher, FetchPolicy
from router_svc.images import ImageLimits, resolve_images
from vision_svc.decode import decode
from vision_svc.settings import VisionSettings

IMAGES = Path(__file__).parents[1] / "data" / "images"
LIMITS = ImageLimits(max_image_bytes=1_000_000, max_total_image_bytes=10_000_000)
NO_FETCHING = FetchPolicy(
    hosts=(), networks=(), max_bytes=1_000_000, max_redirects=0, timeout_seconds=1, max_connections=1
)


@pytest.mark.parametrize("name", ["rgba_hidden_red.png", *(f"exif_{number}.jpg" for number in range(1, 9))])
async def test_bytes_file_and_data_url_give_the_same_pixels(name: str) -> None:
    path = IMAGES / name
    data = path.read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    # Bytes and a URL by the client, a file by the client, a file and a URL by the command line.
    ways = [image_part(data), image_part(url), image_part(path), *image_parts([str(path), url])]
    request = chat_request(ways)
    await resolve_images(request, LIMITS, Fetcher(NO_FETCHING))
    rules = VisionSettings(model=Path("unused")).decode_rules
    pictures = [decode(part.image.data, rules) for part in request.chat.messages[0].parts]
    assert len(pictures) == 5
    assert len({(picture.size, hashlib.sha256(picture.tobytes()).digest()) for picture in pictures}) == 1
