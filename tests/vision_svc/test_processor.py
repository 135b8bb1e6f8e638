"""The processor is upstream's, and every picture within the aspect limit has at least one visual token."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Glm5NextImageProcessorPil

from vision_svc.processor import PatchProcessor


@pytest.fixture(scope="module")
def processor(tiny_checkpoint: Path) -> PatchProcessor:
    return PatchProcessor(tiny_checkpoint)


def test_patches_are_upstreams(processor: PatchProcessor, tiny_checkpoint: Path) -> None:
    image = Image.effect_noise((130, 90), 80).convert("RGB")
    right = Glm5NextImageProcessorPil.from_pretrained(tiny_checkpoint)(images=[image], return_tensors="pt")
    patches = processor(image)
    assert np.array_equal(patches.pixels.numpy(), right["pixel_values"].numpy())
    assert [[1, patches.grid_height, patches.grid_width]] == right["image_grid_thw"].tolist()


def test_torchvision_is_not_used(processor: PatchProcessor) -> None:
    processor(Image.new("RGB", (50, 50)))
    assert "torchvision" not in sys.modules


# Case 6: one rule, upstream's: small pictures are enlarged to the processor's minimum.
@pytest.mark.parametrize(
    ("size", "grid"),
    [((1, 1), (4, 4)), ((2, 2), (4, 4)), ((27, 257), (20, 2)), ((332, 27), (2, 24)), ((1, 200), (16, 2))],
)
def test_small_and_narrow_pictures(processor: PatchProcessor, size: tuple[int, int], grid: tuple[int, int]) -> None:
    patches = processor(Image.new("RGB", size, (200, 30, 30)))
    assert (patches.grid_height, patches.grid_width) == grid
    assert np.isfinite(patches.pixels.numpy()).all()


@settings(max_examples=40, deadline=None)
@given(short=st.integers(1, 40), ratio=st.floats(1, 200), wide=st.booleans())
def test_never_zero_tokens_and_never_above_the_maximum(
    processor: PatchProcessor, short: int, ratio: float, wide: bool
) -> None:
    size = (int(short * ratio), short) if wide else (short, int(short * ratio))
    image = Image.new("RGB", size)
    patches = processor(image)
    assert processor.merge_size**2 <= patches.count <= processor.max_patches
    assert patches.grid_height % processor.merge_size == patches.grid_width % processor.merge_size == 0
    assert patches.count == processor.patch_count(image)


def test_another_processor_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint / "preprocessor_config.json").read_text())
    config["image_processor_type"] = "CLIPImageProcessor"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="CLIPImageProcessor"):
        PatchProcessor(tmp_path)


def test_fingerprint_follows_the_configuration(
    processor: PatchProcessor, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoint / "preprocessor_config.json", tmp_path)
    assert PatchProcessor(tmp_path).fingerprint == processor.fingerprint
    config = json.loads((tmp_path / "preprocessor_config.json").read_text())
    config["max_image_tokens"] = 32
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert PatchProcessor(tmp_path).fingerprint != processor.fingerprint
