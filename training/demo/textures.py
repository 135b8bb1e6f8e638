"""Backgrounds, noise and made-up photographs; knows nothing of what is drawn on them."""

from __future__ import annotations

import io
from functools import cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from training.demo.photograph import draw_photograph

NOISE_PIXELS = 512
PHOTOGRAPHS = 12
# The held-out set has the photographs from seed 1 on; training must not know them.
PHOTOGRAPH_SEEDS = {"train": 1000, "held_out": 1}

Colour = tuple[int, int, int]


@cache
def noise() -> np.ndarray:
    """Normal noise float32 [512, 512], drawn once; pictures take random cuts of it."""
    return np.random.default_rng(0).standard_normal((NOISE_PIXELS, NOISE_PIXELS)).astype(np.float32)


def noise_cut(random: Random, pixels: int) -> np.ndarray:
    top, left = random.randrange(NOISE_PIXELS - pixels), random.randrange(NOISE_PIXELS - pixels)
    return noise()[top : top + pixels, left : left + pixels]


def distance(first: Colour, second: Colour) -> float:
    """Of two colours, weighted a little as eyes do, 0 to about 765."""
    red, green, blue = (a - b for a, b in zip(first, second, strict=True))
    return float((2 * red * red + 4 * green * green + 3 * blue * blue) ** 0.5)


def brightness(colour: Colour) -> float:
    """0 to 255, the usual weights of the three."""
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def random_colour(random: Random) -> Colour:
    """Often white or near it, at times dark, else anything."""
    kind = random.random()
    if kind < 0.25:
        return (255, 255, 255)
    if kind < 0.5:
        level = random.randint(215, 255)
        return (level, level, level)
    if kind < 0.65:
        level = random.randint(0, 60)
        return (level, level, level)
    return (random.randrange(256), random.randrange(256), random.randrange(256))


def filled(random: Random, colour: Colour, pixels: int) -> np.ndarray:
    """Float32 [pixels, pixels, 3] of a colour; at times with a slight slope from one side to the other."""
    canvas = np.empty((pixels, pixels, 3), dtype=np.float32)
    canvas[:] = colour
    if random.random() < 0.25:
        slope = np.linspace(-1, 1, pixels, dtype=np.float32) * random.uniform(-25, 25)
        canvas += slope[:, None, None] if random.random() < 0.5 else slope[None, :, None]
    return canvas


@cache
def photographs(split: str) -> list[Image.Image]:
    """Evening landscapes, each drawn from a seed."""
    first = PHOTOGRAPH_SEEDS[split]
    return [
        Image.open(io.BytesIO(draw_photograph(width=240, height=180, seed=seed))).convert("RGB")
        for seed in range(first, first + PHOTOGRAPHS)
    ]


def photograph(random: Random, split: str, pixels: int) -> np.ndarray:
    """Something that is neither shape nor text: a landscape, clouds or a collage; uint8 [pixels, pixels, 3]."""
    kind = random.random()
    if kind < 0.4:
        source = photographs(split)[random.randrange(PHOTOGRAPHS)]
        # The whole scene squeezed into a square, as the image processor does, or a square part of it.
        if random.random() < 0.5:
            box = (0, 0, source.width, source.height)
        else:
            side = random.randint(120, source.height)
            left, top = random.randint(0, source.width - side), random.randint(0, source.height - side)
            box = (left, top, left + side, top + side)
        image = source.resize((pixels, pixels), Image.Resampling.BILINEAR, box=box)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image)
    if kind < 0.7:
        return clouds(random, pixels)
    return collage(random, pixels)


def clouds(random: Random, pixels: int) -> np.ndarray:
    """Noise at several scales between two colours."""
    level = np.zeros((pixels, pixels), dtype=np.float32)
    for cells in (3, 6, 12, 28):
        coarse = Image.fromarray(noise_cut(random, cells))
        level += np.asarray(coarse.resize((pixels, pixels), Image.Resampling.BICUBIC)) * (3 / cells) ** 0.7
    level = 1 / (1 + np.exp(-level * 1.5))
    first, second = (np.array([random.randrange(256) for _ in range(3)], dtype=np.float32) for _ in range(2))
    canvas = first + level[:, :, None] * (second - first) + 6 * noise_cut(random, pixels)[:, :, None]
    return np.clip(canvas, 0, 255).astype(np.uint8)


def collage(random: Random, pixels: int) -> np.ndarray:
    """Many overlapping polygons of all colours."""
    image = Image.new("RGB", (pixels, pixels), random_colour(random))
    draw = ImageDraw.Draw(image)
    for _ in range(random.randint(12, 40)):
        x, y, size = random.uniform(0, pixels), random.uniform(0, pixels), random.uniform(8, 45)
        points = [
            (x + random.uniform(-size, size), y + random.uniform(-size, size)) for _ in range(random.randint(3, 6))
        ]
        draw.polygon(points, fill=tuple(random.randrange(256) for _ in range(3)))
    return np.asarray(image)
