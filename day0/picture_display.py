"""Pictures in a terminal, two pixels a character; knows nothing of what they are for."""

from __future__ import annotations

import io

from rich.color import Color
from rich.style import Style
from rich.text import Text

COLUMNS = 28


def half_blocks(image: bytes, *, columns: int = COLUMNS) -> Text:
    """The picture in coloured half blocks, `columns` characters wide; its proportions stay, its detail does not."""
    from PIL import Image

    picture = Image.open(io.BytesIO(image)).convert("RGB")
    rows = max(round(columns * picture.height / picture.width / 2), 1)
    small = picture.resize((columns, 2 * rows), Image.Resampling.BOX)
    text = Text(no_wrap=True)
    for row in range(rows):
        for column in range(columns):
            upper, lower = (_colour(small.getpixel((column, 2 * row + half))) for half in (0, 1))
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n")
    return text


def _colour(pixel: object) -> Color:
    assert isinstance(pixel, tuple)
    return Color.from_rgb(*pixel)
