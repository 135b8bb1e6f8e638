"""The tiny checkpoint is complete, loads through the Auto classes, and its answers can tell right from wrong."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from day0.tiny import SPECIAL_TOKENS, build_tokenizer, write_tiny_checkpoint
from training.demo.photograph import draw_photograph


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path):
    return AutoModelForImageTextToText.from_pretrained(tiny_checkpoint).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_layout_is_complete(tiny_checkpoint: Path) -> None:
    names = {path.name for path in tiny_checkpoint.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "model.safetensors.index.json",
    } <= names
    weight_map = json.loads((tiny_checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    shards = set(weight_map.values())
    assert len(shards) >= 2 and shards <= names
    held = {name: shard for shard in shards for name in safe_open(tiny_checkpoint / shard, "pt").keys()}  # noqa: SIM118
    assert held == weight_map


def test_same_seed_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    again = digests(write_tiny_checkpoint(tmp_path / "again"))
    other = digests(write_tiny_checkpoint(tmp_path / "other", seed=1))
    assert again == digests(tiny_checkpoint)
    assert {name for name in again if again[name] != other[name]} == {name for name in again if "model-" in name}


def test_tokenizer_covers_every_text_and_every_id(tokenizer, model) -> None:
    assert len(tokenizer) == model.config.text_config.vocab_size
    for text in ("Hello, world!\n", "👩‍👩‍👧 ďábel 世界", "\x00\x7f\u00a0", "  two  spaces "):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(624, 640))


def test_chat_template(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\na<|begin_of_image|><|image|><|end_of_image|>b"
        "<|assistant|>\nc<|user|>\nd<|assistant|>\n"
    )


def prompt(tokenizer, text: str, visual_tokens: int = 0) -> torch.Tensor:
    content = ([{"type": "image"}] if visual_tokens else []) + [{"type": "text", "text": text}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    ).replace("<|image|>", "<|image|>" * visual_tokens)
    return tokenizer(rendered, return_tensors="pt", add_special_tokens=False)["input_ids"]


def generate(model, ids: torch.Tensor, tokens: int, **inputs: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.stack(out.logits)[:, 0]


@pytest.mark.parametrize("text", ["What is the capital of France?", "A model reads the text from left to right. " * 12])
def test_greedy_answers_are_varied_and_far_from_ties(model, tokenizer, text: str) -> None:
    tokens, logits = generate(model, prompt(tokenizer, text), 64)
    best = logits.topk(2).values
    gaps = best[:, 0] - best[:, 1]
    assert len(tokens) == 64 and len(set(tokens)) > 32
    assert (gaps > 1e-3).float().mean() > 0.95
    assert max(tokens) < 624, "a random model must not speak control tokens"
    assert "\ufffd" not in tokenizer.decode(tokens)


def test_rounding_stays_small(model, tokenizer) -> None:
    """Cached steps and one whole forward agree well within the tolerance that parity tests use (2e-4)."""
    ids = prompt(tokenizer, "A model reads the text from left to right. " * 12)
    tokens, logits = generate(model, ids, 32)
    with torch.no_grad():
        whole = model(input_ids=torch.cat([ids, torch.tensor([tokens])], dim=1)).logits[0, ids.shape[1] - 1 : -1]
    assert (whole - logits).abs().max() < 1e-4


def test_pictures_change_the_answer(model, tokenizer, tiny_checkpoint: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(tiny_checkpoint, backend="pil")
    photograph = Image.open(io.BytesIO(draw_photograph(width=200, height=140)))
    answers = []
    for picture in (photograph, photograph.rotate(180)):
        features = processor([picture], return_tensors="pt")
        visual_tokens = int(features["image_grid_thw"][0].prod()) // 4
        assert 4 <= visual_tokens <= 64
        answers.append(generate(model, prompt(tokenizer, "Describe.", visual_tokens), 16, **features)[0])
    assert answers[0] != answers[1]


def test_full_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        write_tiny_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(("vocab", "message"), [(100, "at least 288, got 100"), (100_000, "at most .* got 100000")])
def test_vocabulary_has_bounds(vocab: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(vocab)
