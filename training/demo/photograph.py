"""Draws a made-up photograph, a house at a lake in the evening, made by this code and nobody's property."""

from __future__ import annotations

import io
import math
import random


def draw_photograph(*, width: int = 640, height: int = 428, seed: int = 1) -> bytes:
    """JPEG bytes of a scene with sky, sun, mountains, water, trees, a house and sensor noise; RGB, `width` x `height`.

    The same arguments give the same picture.
    """
    from PIL import Image, ImageChops, ImageDraw, ImageFilter

    chance = random.Random(seed)
    horizon = int(height * 0.58)
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    for y in range(height):
        if y < horizon:
            warm = y / horizon
            colour = (int(70 + 170 * warm), int(105 + 75 * warm), int(165 - 35 * warm))
        else:
            deep = (y - horizon) / (height - horizon)
            colour = (int(150 - 115 * deep), int(125 - 70 * deep), int(120 - 30 * deep))
        draw.line((0, y, width, y), fill=colour)
    glow = Image.new("RGB", (width, height))
    sun_x, sun_y = int(width * 0.68), int(horizon * 0.72)
    ImageDraw.Draw(glow).ellipse((sun_x - 34, sun_y - 34, sun_x + 34, sun_y + 34), fill=(255, 214, 140))
    picture = ImageChops.screen(picture, glow.filter(ImageFilter.GaussianBlur(14)))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((sun_x - 20, sun_y - 20, sun_x + 20, sun_y + 20), fill=(255, 240, 205))
    for depth, base in enumerate(((96, 92, 118), (66, 68, 92), (40, 50, 58))):
        top = horizon - (95 - 30 * depth)
        ridge: list[tuple[float, float]] = [(0, horizon)]
        for x in range(0, width + 8, 8):
            wave = math.sin(x / (70 - 14 * depth) + 2 * depth) * 26 + math.sin(x / 23 + depth) * 8
            ridge.append((x, top + wave + chance.uniform(-3, 3)))
        draw.polygon([*ridge, (width, horizon)], fill=base)
    for _ in range(150):
        left, level = chance.uniform(0, width), chance.uniform(horizon + 4, height)
        length = chance.uniform(6, 40) * (0.3 + (level - horizon) / (height - horizon))
        near_sun = abs(left - sun_x) < 60
        draw.line((left, level, left + length, level), fill=(245, 205, 150) if near_sun else (128, 122, 130))
    _draw_house(draw, int(width * 0.2), horizon)
    for _ in range(26):
        trunk = chance.choice((chance.uniform(0, width * 0.16), chance.uniform(width * 0.8, width)))
        size = chance.uniform(18, 46)
        foot = horizon + 6
        draw.polygon(((trunk - size / 3, foot), (trunk + size / 3, foot), (trunk, horizon - size)), fill=(22, 38, 30))
    picture = picture.filter(ImageFilter.GaussianBlur(0.7))
    noise = Image.frombytes("L", (width, height), bytes(chance.randrange(0, 14) for _ in range(width * height)))
    picture = ImageChops.add(picture, Image.merge("RGB", (noise, noise, noise)))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=88)
    return out.getvalue()


def _draw_house(draw: object, left: int, ground: int) -> None:
    from PIL import ImageDraw

    assert isinstance(draw, ImageDraw.ImageDraw)
    draw.rectangle((left, ground - 42, left + 84, ground + 8), fill=(146, 62, 48))
    draw.polygon(((left - 8, ground - 42), (left + 92, ground - 42), (left + 42, ground - 78)), fill=(58, 44, 46))
    for x in (left + 12, left + 52):
        draw.rectangle((x, ground - 30, x + 18, ground - 10), fill=(255, 222, 140))
    draw.rectangle((left + 36, ground - 16, left + 46, ground + 8), fill=(60, 36, 30))
