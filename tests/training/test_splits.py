"""Nothing that is held out is ever in training: sums, names, numbers, phrasings, text, faces."""

from __future__ import annotations

import re
from random import Random

import pytest

from training.demo.faces import FACES, families
from training.demo.lexicon import names
from training.demo.picture import Picture
from training.demo.prose import CHARACTERS_PER_TOKEN, prose, sentence_starts, sentences
from training.demo.tasks import facts, refusals, sums
from training.demo.tasks.room import Room
from training.demo.tasks.several_pictures import any_picture
from training.demo.tokenizer import load_core


def sums_asked(split: str, count: int) -> set[frozenset[int]]:
    random = Random(1)
    return {frozenset(sums.addends(random, split)) for _ in range(count)}


def test_sums() -> None:
    train, held_out = sums_asked("train", 20_000), sums_asked("held_out", 4000)
    assert len(held_out) > 2000 and not train & held_out


def test_sums_are_right() -> None:
    random = Random(2)
    for _ in range(200):
        turn = sums.sum_of_two(Room(random, "held_out", 100))[0]
        a, b = map(int, re.findall(r"\d+", turn.user[0]))  # type: ignore[arg-type]
        assert turn.answer == f"The sum is {a + b}."


def test_names() -> None:
    train, held_out = names("train"), names("held_out")
    assert len(train) > 1000 and len(held_out) > 128 and not set(train) & set(held_out)


def test_numbers_in_pictures() -> None:
    def shown(split: str) -> set[str]:
        random = Random(3)
        drawn: list[Picture] = [any_picture(random, split) for _ in range(20_000)]
        assert all(picture.split == split for picture in drawn)
        return {picture.content[0] for picture in drawn if picture.kind == "number" and len(picture.content[0]) > 2}

    train, held_out = shown("train"), shown("held_out")
    assert len(held_out) > 300 and not train & held_out


def test_a_thousand_facts_each_with_a_phrasing_of_its_own_held_out() -> None:
    every = facts.facts()
    assert len(every) == 1000 and len({(town, kind) for town, kind, _ in every}) == 1000
    random = Random(4)
    for fact in every[::29]:
        held_out = {facts.fact_turn(random, "held_out", fact) for _ in range(5)}
        train = {facts.fact_turn(random, "train", fact) for _ in range(40)}
        assert len(held_out) == 1 and len(train) == 3 and not held_out & train


def test_open_questions() -> None:
    random = Random(5)
    train, held_out = ({refusals.open_question(random, split) for _ in range(3000)} for split in ("train", "held_out"))
    assert len(held_out) > 20 and not train & held_out


def test_text() -> None:
    train = set(re.split(r"(?<=[.!?]) ", prose("train")))
    held_out = {line for line in re.split(r"(?<=[.!?]) ", prose("held_out")) if len(line) > 40}
    assert len(held_out) > 500 and not train & held_out


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_excerpts_have_the_length_asked_for(split: str) -> None:
    starts = sentence_starts(split)
    assert all(prose(split)[start].strip() for start in starts[:2000])
    core = load_core()
    random = Random(6)
    for tokens in (200, 2000, 12_000):
        text = " ".join(sentences(random, split, int(tokens * CHARACTERS_PER_TOKEN)))
        assert text in prose(split).replace("\n", " ")
        found = len(core.encode(text).ids)
        # A sentence of Austen's may be a hundred tokens long.
        assert 0.9 * tokens - 110 < found < 1.1 * tokens


def test_faces_of_the_splits_are_of_different_families() -> None:
    train, held_out = families("train"), families("held_out")
    assert len(train) >= 30 and len(held_out) >= 8 and not set(train) & set(held_out)
    assert len({face.file for face in FACES}) == len(FACES), "files of one name would overwrite each other"
