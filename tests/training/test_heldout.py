"""Held-out examples of every score: well-formed, answerable, reproducible, and whole after freezing."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast

from training.demo import freeze
from training.demo.chat import IMAGE_TOKENS
from training.demo.heldout import SCORES, Example, examples, render
from training.demo.tokenizer import CONTEXT_TOKENS

pytestmark = pytest.mark.usefixtures("grey_pictures")


def pictures(example: Example) -> list[bytes]:
    return [part for _, parts in example.messages for part in parts if isinstance(part, bytes)]


def last_text(example: Example) -> str:
    return " ".join(part for part in example.messages[-1][1] if isinstance(part, str))


@pytest.mark.parametrize("task", SCORES)
def test_examples_are_well_formed(task: str, tokenizer: PreTrainedTokenizerFast) -> None:
    found = examples(task, 6, 0)
    assert len(found) == 6 and found == examples(task, 6, 0) and found != examples(task, 6, 1)
    for example in found:
        roles = [role for role, _ in example.messages if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(parts for _, parts in example.messages)
        ids, answer, images = render(example, tokenizer)
        text = tokenizer.decode(ids)
        assert text.startswith("[gMASK]<sop><|") and text.endswith("<|assistant|>\n")
        assert len(ids) + len(answer) <= CONTEXT_TOKENS
        assert tokenizer.decode(answer) == example.answer + "<|user|>"
        assert images.shape == (len(pictures(example)), 112, 112, 3)
        assert text.count("<|image|>" * IMAGE_TOKENS) == len(images)
        for png, image in zip(pictures(example), images, strict=True):
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")), image)


@pytest.mark.parametrize("task", [task for task in SCORES if task.startswith(("pairs", "needle"))])
def test_what_is_asked_stands_in_the_text_once(task: str) -> None:
    for example in examples(task, 5, 3):
        value = re.search(r"is (\w+)\.$", example.answer)
        assert value
        if task.startswith("pairs"):
            assert last_text(example).count(value.group(1)) >= 1
            assert len(re.findall(r"\d{3}[.,]", last_text(example))) == int(task.split("_")[1])
        else:
            subject = example.answer.split(" for ")[1].split(" is ")[0]
            assert len(
                re.findall(rf"\b{value.group(1)}\b.*{subject}|{subject}.*\b{value.group(1)}\b", last_text(example))
            )


@pytest.mark.parametrize(
    ("task", "least", "most"),
    [
        ("pairs_128_at_1k", 850, 1024),
        ("pairs_256_at_2k", 1700, 2048),
        ("pairs_340_at_4k", 3600, 4096),
        ("needle_8k", 7600, 8600),
        ("needle_16k", 15_000, CONTEXT_TOKENS),
        ("far_picture_1000", 900, 1500),
    ],
)
def test_long_prompts_have_their_length(task: str, least: int, most: int, tokenizer: PreTrainedTokenizerFast) -> None:
    for example in examples(task, 5, 2):
        assert least <= len(render(example, tokenizer)[0]) <= most


def test_needles_lie_at_five_depths() -> None:
    depths = []
    for example in examples("needle_4k", 5, 4):
        text = last_text(example)
        value = re.search(r"is (\w+)\.$", example.answer)
        assert value
        depths.append(re.search(rf"\b{value.group(1)}\b", text).start() / len(text))  # type: ignore[union-attr]
    assert depths == sorted(depths) and depths[0] < 0.1 and depths[-1] > 0.9


def test_second_turns_need_the_first() -> None:
    for example in examples("second_turns", 10, 0):
        assert len(example.messages) == 3
        assert not any(character.isdigit() for character in last_text(example)) or "The sum is" in example.answer


def test_an_unknown_score_is_named() -> None:
    with pytest.raises(ValueError, match=r"task must be one of shapes, .*, got poems"):
        examples("poems", 1, 0)


def test_frozen_examples_come_back(tmp_path: Path) -> None:
    chosen = freeze.frozen_examples(2, 5)
    assert {example.task for example in chosen} == set(SCORES)
    size = freeze.write(tmp_path / "held_out.jsonl.xz", chosen)
    assert size == (tmp_path / "held_out.jsonl.xz").stat().st_size < 1 << 20
    assert freeze.read(tmp_path / "held_out.jsonl.xz") == chosen
