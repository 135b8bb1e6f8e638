"""The encoder gives upstream's own numbers, the same bits in any company, and refuses weights that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Glm5NextForConditionalGeneration

from tests.vision_svc.checkpoints import encoder_of, vision_files
from vision_svc.encoder import EncodeError, Encoder, VisualTokens
from vision_svc.processor import Patches, PatchProcessor
from vision_svc.weights import WeightsError

SIZES = [(64, 64), (1, 1), (130, 90), (30, 200), (300, 180)]


@pytest.fixture(scope="module")
def images(tiny_checkpoint: Path) -> list[Patches]:
    processor = PatchProcessor(tiny_checkpoint)
    return [processor(Image.effect_noise(size, 90).convert("RGB")) for size in SIZES]


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint: Path) -> Encoder:
    return encoder_of(tiny_checkpoint)


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def rows(tokens: VisualTokens | EncodeError) -> np.ndarray:
    assert isinstance(tokens, VisualTokens), tokens
    return np.frombuffer(tokens.data, np.float32).reshape(tokens.tokens, tokens.hidden)


def upstream_features(checkpoint: Path, images: list[Patches]) -> list[np.ndarray]:
    model = Glm5NextForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    grid = torch.tensor([[1, image.grid_height, image.grid_width] for image in images])
    with torch.inference_mode():
        features = model.get_image_features(torch.cat([image.pixels for image in images]), grid).pooler_output
    return [part.numpy() for part in features]


def test_tokens_are_upstreams_bit_for_bit(encoder: Encoder, images: list[Patches], tiny_checkpoint: Path) -> None:
    for image, tokens in zip(images, encoder.encode(images), strict=True):
        (right,) = upstream_features(tiny_checkpoint, [image])
        assert rows(tokens).shape == right.shape == (image.count // 4, encoder.hidden)
        assert np.array_equal(rows(tokens), right)
        assert rows(tokens).std() > 0.01, "the features are constant; the test shows nothing"


def test_upstreams_packed_call_differs_by_rounding_only(
    encoder: Encoder, images: list[Patches], tiny_checkpoint: Path
) -> None:
    for tokens, right in zip(encoder.encode(images), upstream_features(tiny_checkpoint, images), strict=True):
        np.testing.assert_allclose(rows(tokens), right, rtol=0, atol=1e-5)


def test_bits_do_not_depend_on_neighbours(encoder: Encoder, images: list[Patches]) -> None:
    alone = [encoder.encode([image])[0] for image in images]
    for order in (range(5), [4, 3, 2, 1, 0], [2, 2, 0, 1, 1]):
        for place, tokens in zip(order, encoder.encode([images[place] for place in order]), strict=True):
            assert tokens == alone[place]


def test_packed_forward_differs_by_rounding_only(
    encoder: Encoder, images: list[Patches], tiny_checkpoint: Path
) -> None:
    packed = encoder_of(tiny_checkpoint, batch_invariant=False)
    assert packed.fingerprint != encoder.fingerprint
    for ours, right in zip(packed.encode(images), encoder.encode(images), strict=True):
        np.testing.assert_allclose(rows(ours), rows(right), rtol=0, atol=1e-5)


def test_bfloat16_sends_two_bytes_an_element(images: list[Patches], tiny_checkpoint: Path, encoder: Encoder) -> None:
    half = encoder_of(tiny_checkpoint, dtype="bfloat16")
    (tokens,) = half.encode(images[:1])
    assert isinstance(tokens, VisualTokens)
    assert len(tokens.data) == tokens.tokens * tokens.hidden * 2
    wide = torch.frombuffer(bytearray(tokens.data), dtype=torch.bfloat16).float().numpy()
    right = rows(encoder.encode(images[:1])[0]).reshape(-1)
    assert np.corrcoef(wide, right)[0, 1] > 0.99


def test_attention_is_sdpa(encoder: Encoder, images: list[Patches], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(args[0].shape)
        return real(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    encoder.encode(images[:1])
    assert len(calls) == 2, "one call for each of the tower's two layers"


def test_infinite_tokens_fail_their_own_image_only(encoder: Encoder, images: list[Patches]) -> None:
    broken = Patches(torch.full_like(images[0].pixels, torch.nan), images[0].grid_height, images[0].grid_width)
    good, bad = encoder.encode([images[1], broken])
    assert good == encoder.encode([images[1]])[0]
    assert isinstance(bad, EncodeError) and "not finite" in str(bad)


def edit_one_tensor(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor], str], None]) -> str:
    file, names = sorted(vision_files(checkpoint).items())[0]
    name = sorted(names)[0]
    tensors = load_file(checkpoint / file)
    edit(tensors, name)
    save_file(tensors, checkpoint / file)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    owned = {key: owner for key, owner in index["weight_map"].items() if owner != file}
    index["weight_map"] = owned | dict.fromkeys(tensors, file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    return name.removeprefix("model.visual.")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors, name: tensors.pop(name), "missing {name}"),
        (lambda tensors, name: tensors.update({"model.visual.extra.weight": torch.ones(1)}), "unexpected extra.weight"),
        (lambda tensors, name: tensors.update({name: tensors[name][:1].clone()}), "{name} has shape"),
        (lambda tensors, name: tensors.update({name: tensors[name].to(torch.int8)}), "{name}' has dtype I8"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    checkpoint: Path, edit: Callable[[dict[str, torch.Tensor], str], None], says: str
) -> None:
    name = edit_one_tensor(checkpoint, edit)
    with pytest.raises(WeightsError) as caught:
        encoder_of(checkpoint)
    assert says.format(name=name) in str(caught.value)


def test_warm_up_notices_weights_that_give_no_numbers(checkpoint: Path) -> None:
    edit_one_tensor(checkpoint, lambda tensors, name: tensors[name].fill_(torch.nan))
    with pytest.raises(EncodeError, match="not finite"):
        encoder_of(checkpoint).warm_up()


def test_another_architecture_is_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    with pytest.raises(WeightsError, match="'qwen3_vl'"):
        encoder_of(checkpoint)
