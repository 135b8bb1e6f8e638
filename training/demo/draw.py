"""Draws a picture as 112 x 112 pixels; knows nothing of tasks, tokens or processes."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageFilter

from training.demo.faces import ASSETS, Face, families, load
from training.demo.lexicon import COLOURS, SHAPES
from training.demo.picture import Picture
from training.demo.shapes_drawn import shape_mask
from training.demo.splits import HELD_OUT, TRAIN
from training.demo.textures import (
    Colour,
    brightness,
    distance,
    filled,
    noise_cut,
    photograph,
    random_colour,
)

PICTURE_PIXELS = 112
MIN_SHAPE_CONTRAST = 150.0
MIN_TEXT_CONTRAST = 85.0
# Every fifth of scikit-learn's 1,797 digits is kept from training.
HELD_OUT_DIGITS_STEP = 5


class Painter:
    """Draws pictures, each fixed by its own seed: the same picture is the same pixels in every process."""

    def __init__(self, folder: Path = ASSETS) -> None:
        self._folder = folder

    def __call__(self, picture: Picture) -> np.ndarray:
        """uint8 [112, 112, 3], RGB."""
        random = Random(picture.seed)
        match picture.kind:
            case "shape":
                canvas = self._shapes(random, [(picture.content[0], picture.content[1])], [one_place(random)])
            case "sides":
                left_colour, left_shape, right_colour, right_shape = picture.content
                canvas = self._shapes(
                    random, [(left_colour, left_shape), (right_colour, right_shape)], side_places(random)
                )
            case "count":
                count = int(picture.content[0])
                canvas = self._shapes(random, counted_shapes(random, count), scattered_places(random, count))
            case "number" | "word":
                canvas = self._text(random, cased(random, picture), picture.split)
            case "digit":
                canvas = self._digit(random, int(picture.content[0]), picture.split)
            case "photo":
                return photograph(random, picture.split, PICTURE_PIXELS)
            case _:
                raise ValueError(f"no way to draw a picture of kind {picture.kind}")
        # Noise makes training harder; what is frozen for tests should stay small as PNG.
        if picture.split == TRAIN and random.random() < 0.3:
            canvas += noise_cut(random, PICTURE_PIXELS)[:, :, None] * random.uniform(1, 7)
        return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)

    def _shapes(
        self, random: Random, shapes: list[tuple[str, str]], places: list[tuple[float, float, float]]
    ) -> np.ndarray:
        colours = [varied(random, COLOURS[colour]) for colour, _ in shapes]
        canvas = filled(random, contrasting(random, colours), PICTURE_PIXELS)
        for (_, shape), colour, (x, y, radius) in zip(shapes, colours, places, strict=True):
            turn = random.uniform(-12, 12) if shape in ("square", "diamond") else random.uniform(-18, 18)
            mask = shape_mask(shape, radius, turn, random.uniform(0.92, 1.08))
            blend(canvas, mask, x - mask.shape[1] / 2, y - mask.shape[0] / 2, colour)
        return canvas

    def _text(self, random: Random, text: str, split: str) -> np.ndarray:
        """The text in a random face, scaled to a random width, on a colour it can be read on."""
        every = face_list(split)
        face, weight = random.choice(random.choice(every))
        drawn = load(face, weight, self._folder).getmask(text, mode="L")
        image = Image.frombytes("L", drawn.size, bytes(drawn))
        image = image.crop(image.getbbox())
        # Bolder, thinner, slanted, narrower and wider letters stand for faces that training does not have.
        if split == TRAIN and random.random() < 0.15:
            image = image.filter(random.choice((ImageFilter.MaxFilter, ImageFilter.MinFilter))(3))
        if split == TRAIN and random.random() < 0.25:
            image = slanted(image, random.uniform(-0.3, 0.3))
        turn = random.uniform(-7, 7) if random.random() < 0.5 else 0.0
        ink = image.width / image.height
        # Wide enough that each character has some pixels; never higher than the picture.
        widest = min(104.0, 88.0 * ink)
        width = random.uniform(max(0.62 * widest, min(13.0 * len(text), widest)), widest)
        narrow, wide = (0.75, 1.3) if split == TRAIN and random.random() < 0.3 else (0.88, 1.15)
        height = min(max(width / ink * random.uniform(narrow, wide), 9.0), 96.0)
        if turn:
            # Scaled before it is turned: turning costs by the pixel.
            image = image.resize((max(round(1.5 * width), 4), max(round(1.5 * height), 4)), Image.Resampling.BOX)
            image = image.rotate(turn, Image.Resampling.BILINEAR, expand=True)
            width, height = min(image.width / 1.5, 108), min(image.height / 1.5, 108)
        mask = image.resize((max(round(width), 4), max(round(height), 4)), Image.Resampling.BOX)
        return self._on_colour(random, np.asarray(mask, dtype=np.float32) / 255)

    def _digit(self, random: Random, digit: int, split: str) -> np.ndarray:
        """One of scikit-learn's handwritten digits, scaled up smoothly."""
        choices = handwritten(self._folder)[split == HELD_OUT][digit]
        small = Image.fromarray(choices[random.randrange(len(choices))])
        if random.random() < 0.5:
            small = small.resize((32, 32), Image.Resampling.BICUBIC).rotate(
                random.uniform(-8, 8), Image.Resampling.BILINEAR
            )
        side = random.randint(60, 108)
        high = round(side * random.uniform(0.9, 1.1))
        resample = Image.Resampling.BICUBIC if random.random() < 0.8 else Image.Resampling.NEAREST
        mask = np.asarray(small.resize((side, min(high, 110)), resample), dtype=np.float32) / 255
        if random.random() < 0.4:
            mask = 1 / (1 + np.exp(-(mask - 0.45) * 12))
        return self._on_colour(random, mask)

    def _on_colour(self, random: Random, mask: np.ndarray) -> np.ndarray:
        ground, ink = readable_pair(random)
        canvas = filled(random, ground, PICTURE_PIXELS)
        height, width = mask.shape
        blend(
            canvas,
            mask,
            random.uniform(1, max(PICTURE_PIXELS - width - 1, 1)),
            random.uniform(1, max(PICTURE_PIXELS - height - 1, 1)),
            ink,
        )
        return canvas


def slanted(image: Image.Image, slant: float) -> Image.Image:
    """The grey image sheared to the right by `slant` times its height, or to the left; nothing is cut off."""
    more = round(abs(slant) * image.height)
    shift = slant * image.height if slant > 0 else 0.0
    matrix = (1.0, slant, -shift, 0.0, 1.0, 0.0)
    size = (image.width + more, image.height)
    return image.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def blend(canvas: np.ndarray, mask: np.ndarray, x: float, y: float, colour: Colour) -> None:
    """Colour the canvas where the mask, with its corner at (x, y), covers it; what lies outside is cut."""
    left, top = round(x), round(y)
    height, width = mask.shape
    mask = mask[max(-top, 0) : PICTURE_PIXELS - top, max(-left, 0) : PICTURE_PIXELS - left, None]
    part = canvas[max(top, 0) : top + height, max(left, 0) : left + width]
    part += mask * (np.array(colour, dtype=np.float32) - part)


def varied(random: Random, colour: Colour) -> Colour:
    """The colour, a little off."""
    red, green, blue = (min(max(value + random.randint(-14, 14), 0), 255) for value in colour)
    return (red, green, blue)


def contrasting(random: Random, colours: list[Colour]) -> Colour:
    """A background that differs enough from all of the colours."""
    for _ in range(200):
        ground = random_colour(random)
        if all(distance(ground, colour) > MIN_SHAPE_CONTRAST for colour in colours):
            return ground
    return max(
        ((255, 255, 255), (128, 128, 128), (0, 0, 0), (60, 60, 60), (190, 190, 190), (0, 255, 255)),
        key=lambda ground: min(distance(ground, colour) for colour in colours),
    )


def readable_pair(random: Random) -> tuple[Colour, Colour]:
    """Background and ink of sufficiently different brightness; often black on white."""
    if random.random() < 0.25:
        return (255, 255, 255), (0, 0, 0)
    while True:
        ground = random_colour(random)
        ink = (random.randrange(256), random.randrange(256), random.randrange(256))
        if abs(brightness(ground) - brightness(ink)) > MIN_TEXT_CONTRAST:
            return ground, ink


def cased(random: Random, picture: Picture) -> str:
    """A word in lower case, capitals or with a capital; a number as it is."""
    text = picture.content[0]
    kind = random.random()
    if kind < 0.25:
        return text.upper()
    return text.capitalize() if kind < 0.4 else text


def one_place(random: Random) -> tuple[float, float, float]:
    """x, y and radius of a single shape, wholly inside."""
    radius = random.uniform(15, 48)
    margin = radius + 3
    return (random.uniform(margin, 112 - margin), random.uniform(margin, 112 - margin), radius)


def side_places(random: Random) -> list[tuple[float, float, float]]:
    """One place in each half."""
    places = []
    for middle in (28, 84):
        radius = random.uniform(13, 23)
        free = 25 - radius
        places.append((middle + random.uniform(-free, free), random.uniform(radius + 3, 109 - radius), radius))
    return places


def counted_shapes(random: Random, count: int) -> list[tuple[str, str]]:
    """All alike, or alike in one respect, or mixed."""
    colours = [random.choice(tuple(COLOURS))] * count
    shapes = [random.choice(SHAPES)] * count
    kind = random.random()
    if kind < 0.3:
        palette = random.sample(tuple(COLOURS), 3)
        colours = [random.choice(palette) for _ in range(count)]
    if 0.2 < kind < 0.5:
        shapes = [random.choice(SHAPES) for _ in range(count)]
    return list(zip(colours, shapes, strict=True))


def scattered_places(random: Random, count: int) -> list[tuple[float, float, float]]:
    """Places that keep apart."""
    radius = random.uniform(8.5, 20 if count <= 3 else 15 if count <= 6 else 12.5)
    while True:
        places: list[tuple[float, float, float]] = []
        for _ in range(60 * count):
            x, y = random.uniform(radius + 2, 110 - radius), random.uniform(radius + 2, 110 - radius)
            if all(math.hypot(x - a, y - b) > 2.25 * radius + 2 for a, b, _ in places):
                places.append((x, y, radius))
                if len(places) == count:
                    return places
        radius *= 0.9


@cache
def face_list(split: str) -> list[list[tuple[Face, int | None]]]:
    """Faces of each family of a split, in order of the families' names."""
    return [faces for _, faces in sorted(families(split).items())]


@cache
def handwritten(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and held-out digits, each a list by digit of uint8 [n, 8, 8]; split by index in scikit-learn's file."""
    path = folder / "digits.csv.gz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run python -m training.demo.collect_assets {folder}")
    table = np.loadtxt(path, delimiter=",")
    images = np.minimum(table[:, :64] * (255 / 16), 255).astype(np.uint8).reshape(-1, 8, 8)
    labels = table[:, 64].astype(int)
    kept = np.arange(len(labels)) % HELD_OUT_DIGITS_STEP == 0
    return (
        [images[~kept & (labels == digit)] for digit in range(10)],
        [images[kept & (labels == digit)] for digit in range(10)],
    )
