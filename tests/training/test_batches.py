"""Training batches: fixed by their arguments, labelled on answers alone, pictures at their placeholders."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.conftest import grey
from training.demo.batches import TASKS, Batch, encoder, make_batch
from training.demo.chat import IMAGE_TOKENS

FIELDS = ("ids", "task", "images", "image_slots")


def batch(seed: int = 1, length: int = 512, rows: int = 6, max_images: int = 30, **more: object) -> Batch:
    return make_batch(seed, length, rows, max_images, paint=grey, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [64, 256, 1024, 4096])
def test_the_same_arguments_give_the_same_batch(length: int) -> None:
    first, again = batch(length=length, rows=3), batch(length=length, rows=3)
    other = batch(seed=2, length=length, rows=3)
    held_out = batch(length=length, rows=3, split="held_out")
    for name in FIELDS:
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
    assert not np.array_equal(first.ids, other.ids)
    assert not np.array_equal(first.ids, held_out.ids)


def test_shapes_and_dtypes() -> None:
    made = batch(rows=4, max_images=9)
    assert (made.ids.shape, made.ids.dtype) == ((4, 512), np.int32)
    assert (made.task.shape, made.task.dtype) == ((4, 512), np.int8)
    assert (made.images.shape, made.images.dtype) == ((9, 112, 112, 3), np.uint8)
    assert (made.image_slots.shape, made.image_slots.dtype) == ((9, IMAGE_TOKENS), np.int32)


@pytest.mark.parametrize("length", [256, 2048])
def test_labels_cover_answers_and_their_end_and_nothing_else(length: int) -> None:
    """Read back from the ids alone: after <|assistant|> and a line break, up to and with the next <|user|>."""
    special = encoder().special
    assistant, user, padding = special("<|assistant|>"), special("<|user|>"), special("<|endoftext|>")
    line_break = encoder().text("\n")
    assert len(line_break) == 1
    made = batch(length=length, rows=8)
    answers = 0
    for ids, task in zip(made.ids.tolist(), made.task.tolist(), strict=True):
        expected = [False] * len(ids)
        for start, token in enumerate(ids):
            if token != assistant:
                continue
            assert ids[start + 1] == line_break[0]
            end = ids.index(user, start)
            assert end > start + 2, "an empty answer"
            expected[start + 2 : end + 1] = [True] * (end - start - 1)
            assert len(set(task[start + 2 : end + 1])) == 1, "one answer of two tasks"
            answers += 1
        assert [label >= 0 for label in task] == expected
        # The last answer's end is the row's last token before the padding.
        used = len(ids) - ids[::-1].index(user)
        assert all(token == padding for token in ids[used:])
    assert answers > 8 * length / 100


def test_pictures_lie_at_their_placeholders() -> None:
    made = batch(rows=8, max_images=20)
    flat = made.ids.reshape(-1)
    used = made.image_slots[:, 0] >= 0
    assert 10 < used.sum() <= 20
    assert (flat[made.image_slots[used]] == encoder().image).all()
    assert (made.image_slots[~used] == -1).all()
    assert (np.diff(made.image_slots[used], axis=1) == 1).all()
    assert sorted(made.image_slots[used].reshape(-1)) == np.flatnonzero(flat == encoder().image).tolist()
    assert (flat[made.image_slots[used][:, 0] - 1] == encoder().special("<|begin_of_image|>")).all()
    assert (flat[made.image_slots[used][:, -1] + 1] == encoder().special("<|end_of_image|>")).all()


def test_pictures_come_in_the_order_of_their_places() -> None:
    """Each picture is drawn where its own answer is: numbers as grey levels that the answers name."""

    def level(picture: object) -> np.ndarray:
        return np.full((112, 112, 3), int(picture.content[0]) % 251, dtype=np.uint8)  # type: ignore[attr-defined]

    made = make_batch(3, 256, 5, 20, mix={"numbers": 1.0}, paint=level)
    used = int((made.image_slots[:, 0] >= 0).sum())
    assert used > 10
    answers = np.where(made.task.reshape(-1) >= 0, made.ids.reshape(-1), -1)
    for image, slots in zip(made.images[:used], made.image_slots[:used], strict=True):
        begin = slots[-1] + np.flatnonzero(answers[slots[-1] :] >= 0)[0]
        end = begin + np.flatnonzero(answers[begin:] == encoder().end)[0]
        text = encoder()._tokenizer.decode(answers[begin:end].tolist())
        assert int(text.removeprefix("The number is ").removesuffix(".")) % 251 == image[0, 0, 0]


def test_every_task_occurs_and_a_mix_is_obeyed() -> None:
    seen = {int(task) for seed in range(4) for task in np.unique(batch(seed, 1024, 12, 90).task)} - {-1}
    assert seen == set(range(len(TASKS)))
    only = batch(mix={"sums": 1.0, "facts": 3.0})
    assert set(np.unique(only.task)) == {-1, TASKS.index("sums"), TASKS.index("facts")}
    counts = {name: int((only.task == TASKS.index(name)).sum()) for name in ("sums", "facts")}
    assert counts["facts"] > 1.5 * counts["sums"]


def test_rows_are_nearly_full() -> None:
    for length in (256, 1024, 4096):
        made = batch(length=length, rows=6, max_images=40)
        assert (made.ids == encoder().padding).mean() < 0.08


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 63}, "length must be at least 64, got 63"),
        ({"split": "test"}, "split must be one of train, held_out, got test"),
        ({"mix": {"poems": 1.0}}, "mix names poems"),
        ({"mix": {"sums": -1.0}}, "mix gives sums a share of -1.0"),
        ({"mix": {"sums": 0.0}}, "mix gives every task a share of 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        batch(**arguments)  # type: ignore[arg-type]
