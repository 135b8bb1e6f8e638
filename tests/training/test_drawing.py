"""Pictures show what they say, alike in every process, in faces and digits of their split."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from training.demo import draw, heldout
from training.demo.draw import Painter, handwritten
from training.demo.faces import ASSETS, FACES, load
from training.demo.lexicon import COLOURS, SHAPES
from training.demo.picture import Picture
from training.demo.shapes_drawn import shape_mask

needs_assets = pytest.mark.skipif(
    not (ASSETS / "digits.csv.gz").is_file(), reason="python -m training.demo.collect_assets was not run here"
)


def pieces(covered: np.ndarray) -> int:
    """Connected areas of a boolean picture, corners counted as touching."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(covered), strict=True)}
    count = 0
    while left:
        count += 1
        front = [left.pop()]
        while front:
            y, x = front.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            front += near
    return count


def ground_of(pixels: np.ndarray) -> np.ndarray:
    """The colour at the picture's rim, which nothing covers mostly."""
    return np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]), axis=0)


def test_counts_are_what_is_drawn() -> None:
    paint = Painter()
    random = Random(0)
    for number in range(60):
        count = number % 9 + 1
        pixels = paint(Picture("count", (str(count),), "held_out", random.getrandbits(40))).astype(int)
        # A slope of the background may reach 25 on either side of its middle.
        covered = np.abs(pixels - ground_of(pixels)).sum(axis=2) > 100
        assert pieces(covered) == count


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_its_colour(shape: str) -> None:
    paint = Painter()
    for number, (name, colour) in enumerate(COLOURS.items()):
        pixels = paint(Picture("shape", (name, shape), "held_out", number)).astype(int)
        near = (np.abs(pixels - np.array(colour)) <= 15).all(axis=2)
        assert near.sum() > 120


def test_left_and_right() -> None:
    pixels = Painter()(Picture("sides", ("red", "circle", "blue", "circle"), "held_out", 4)).astype(int)
    for name, half in (("red", pixels[:, :56]), ("blue", pixels[:, 56:])):
        assert (np.abs(half - np.array(COLOURS[name])) <= 15).all(axis=2).sum() > 200


def test_masks_of_shapes_differ() -> None:
    masks = [shape_mask(shape, 20, 0, 1.0) for shape in SHAPES]
    for index, mask in enumerate(masks):
        assert mask.min() >= 0 and mask.max() == 1 and mask[0].max() == 0, "cut at the rim"
        assert all(np.abs(mask - other).mean() > 0.04 for other in masks[:index])


def test_the_same_picture_is_the_same_pixels() -> None:
    picture = Picture("sides", ("red", "circle", "blue", "star"), "train", 12)
    assert np.array_equal(Painter()(picture), Painter()(picture))
    other = Picture("sides", ("red", "circle", "blue", "star"), "train", 13)
    assert not np.array_equal(Painter()(picture), Painter()(other))


@needs_assets
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_text_can_be_read(split: str) -> None:
    """Ink of each picture: enough of it, apart from the ground in brightness, and in separate characters."""
    paint = Painter()
    for seed in range(60):
        pixels = paint(Picture("number", ("1111",), split, seed)).astype(float)
        grey = pixels @ np.array([0.299, 0.587, 0.114])
        ground = np.median(grey)
        ink = np.abs(grey - ground)
        assert np.percentile(ink, 99.5) > 50, seed
        across = (ink > 0.5 * ink.max()).any(axis=0)
        assert across.sum() >= 20, seed


@needs_assets
def test_digits_of_the_splits_differ() -> None:
    train, held_out = handwritten(ASSETS)
    assert sum(map(len, train)) + sum(map(len, held_out)) == 1797
    seen = {image.tobytes() for images in train for image in images}
    kept = [image.tobytes() for images in held_out for image in images]
    assert len(kept) == 360 and all(len(images) > 20 for images in held_out)
    # Split by index; the data set itself holds next to no doubles.
    assert sum(image in seen for image in kept) <= 2


@pytest.mark.parametrize(("split", "level"), [("train", 100), ("held_out", 250)])
def test_each_split_draws_its_own_digits(monkeypatch: pytest.MonkeyPatch, split: str, level: int) -> None:
    """With plain squares in the digits' place: training's are faint, the held-out ones strong."""
    squares = tuple([np.full((1, 8, 8), value, dtype=np.uint8)] * 10 for value in (100, 250))
    seen: list[float] = []
    monkeypatch.setattr(draw, "handwritten", lambda folder: squares)
    monkeypatch.setattr(draw, "blend", lambda canvas, mask, x, y, colour: seen.append(float(mask.max()) * 255))
    for seed in range(40):
        Painter()(Picture("digit", ("5",), split, seed))
    # A steeper curve, drawn at times, changes the level.
    assert min(abs(value - level) for value in seen) < 3
    assert (np.median(seen) > 200) == (split == "held_out")


@needs_assets
def test_each_split_draws_in_in_its_own_faces(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, set[str]] = {"train": set(), "held_out": set()}
    now = "train"

    def noted(face: object, weight: int | None, folder: Path) -> object:
        used[now].add(face.package)  # type: ignore[attr-defined]
        return load(face, weight, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(draw, "load", noted)
    for now in used:
        for seed in range(80):
            Painter()(Picture("word", ("word",), now, seed))
    assert len(used["train"]) > 20 and len(used["held_out"]) == 8 and not used["train"] & used["held_out"]


@needs_assets
def test_pngs_lose_nothing() -> None:
    for kind, content in (("number", ("407",)), ("digit", ("3",)), ("photo", ()), ("shape", ("pink", "heart"))):
        for seed in range(5):
            picture = Picture(kind, content, "held_out", seed)
            example = heldout.Example("x", (("user", (heldout.png(picture),)),), "")
            assert np.array_equal(heldout.pixels(example)[0], heldout.painter()(picture))


def test_missing_files_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run python -m training\.demo\.collect_assets"):
        load.__wrapped__(FACES[0], None, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"run python -m training\.demo\.collect_assets"):
        Painter(tmp_path)(Picture("digit", ("1",), "train", 0))
