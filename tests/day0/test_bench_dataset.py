"""Requests of a benchmark are exactly as asked, and the same for the same seed."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from PIL import Image

from day0.bench.dataset import BadDataset, Shape, make_samples, noise_image, plain_token_ids


def test_lengths_are_exact_and_seeds_decide() -> None:
    shape = Shape(num_prompts=5, input_len=33, output_len=7)
    samples = make_samples(shape, range(10, 20), seed=1)
    assert [len(sample.token_ids) for sample in samples] == [33] * 5
    assert {sample.output_len for sample in samples} == {7}
    assert {token for sample in samples for token in sample.token_ids} == set(range(10, 20))
    assert samples == make_samples(shape, range(10, 20), seed=1)
    assert samples != make_samples(shape, range(10, 20), seed=2)
    assert len({sample.token_ids for sample in samples}) == 5


def test_range_ratio_reaches_both_ends() -> None:
    samples = make_samples(Shape(400, input_len=10, output_len=4, range_ratio=0.25), range(9), seed=0)
    assert {len(sample.token_ids) for sample in samples} == set(range(7, 14))
    assert {sample.output_len for sample in samples} == {3, 4, 5}


def test_prefix_is_shared_and_comes_on_top() -> None:
    samples = make_samples(Shape(3, input_len=5, output_len=1, prefix_len=8), range(1000), seed=0)
    assert len({sample.token_ids[:8] for sample in samples}) == 1
    assert [len(sample.token_ids) for sample in samples] == [13] * 3


def test_request_has_pictures_then_ids() -> None:
    shape = Shape(2, input_len=3, output_len=4, images=2, image_size=(30, 20))
    samples = make_samples(shape, [7], seed=0)
    assert len({image for sample in samples for image in sample.images}) == 4
    request = samples[0].request(model="m", ignore_eos=True, temperature=0.0)
    assert [part.WhichOneof("content") for part in request.completion.parts] == ["image", "image", "token_ids"]
    assert list(request.completion.parts[2].token_ids.ids) == [7, 7, 7]
    sampling = request.sampling
    assert (request.model, sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == ("m", 4, True, 0.0)
    assert not samples[0].request(model="", ignore_eos=False, temperature=None).sampling.HasField("temperature")


def test_noise_image_has_its_size() -> None:
    image = Image.open(io.BytesIO(noise_image(random.Random(0), 40, 25)))
    assert image.size == (40, 25) and len(image.getcolors(1000)) > 900


def test_plain_ids_are_the_vocabulary_without_control_tokens(tiny_checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    special = set(tokenizer.all_special_ids)
    assert special
    assert list(plain_token_ids(tiny_checkpoint)) == [i for i in range(len(tokenizer)) if i not in special]


def test_ids_of_a_list_vocabulary(tmp_path: Path) -> None:
    document = {"model": {"vocab": [["<s>", 0.0], ["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 0}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert list(plain_token_ids(tmp_path)) == [1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("not JSON", "no vocabulary"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 0}]}', "control tokens only"),
    ],
)
def test_bad_tokenizer_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadDataset, match=f"--tokenizer: .*{words}"):
        plain_token_ids(tmp_path)


def test_bad_range_ratio_is_named() -> None:
    with pytest.raises(BadDataset, match=r"--random-range-ratio: .*got 1\.0"):
        make_samples(Shape(1, 1, 1, range_ratio=1.0), [1], seed=0)
