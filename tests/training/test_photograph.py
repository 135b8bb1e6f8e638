"""The drawn photograph is a real JPEG and the same each time."""

from __future__ import annotations

import io

from PIL import Image

from training.demo.photograph import draw_photograph


def test_photograph() -> None:
    data = draw_photograph(width=320, height=214)
    picture = Image.open(io.BytesIO(data))
    picture.load()
    assert (picture.format, picture.size, picture.mode) == ("JPEG", (320, 214), "RGB")
    assert len(picture.getcolors(320 * 214) or []) > 5000
    assert data == draw_photograph(width=320, height=214)
    assert data != draw_photograph(width=320, height=214, seed=2)
