"""Only vision tensors are read, the index decides, and every problem names files and tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vision_svc.weights import (
    VISION_PREFIX,
    WeightsError,
    read_vision_weights,
    vision_files,
    weight_bytes,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def change_index(checkpoint: Path, **owners: str) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"] |= owners
    (checkpoint / INDEX).write_text(json.dumps(index))


def test_language_tensors_are_neither_read_nor_needed(checkpoint: Path) -> None:
    whole = read_vision_weights(checkpoint)
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    only_text = set(weight_map.values()) - {file for name, file in weight_map.items() if name.startswith(VISION_PREFIX)}
    assert only_text, "the checkpoint has no shard without vision tensors; the test shows nothing"
    for file in only_text:
        (checkpoint / file).unlink()
    for file in set(weight_map.values()) - only_text:
        tensors = load_file(checkpoint / file)
        poisoned = {
            name: tensor if name.startswith(VISION_PREFIX) else torch.full_like(tensor, torch.nan)
            for name, tensor in tensors.items()
        }
        save_file(poisoned, checkpoint / file)
    again = read_vision_weights(checkpoint)
    assert again.digest == whole.digest
    assert set(again.tensors) == {
        name.removeprefix(VISION_PREFIX) for name in weight_map if name.startswith(VISION_PREFIX)
    }
    assert set(again.files).isdisjoint(only_text)


def test_progress_adds_up_to_the_expected_bytes(tiny_checkpoint: Path) -> None:
    steps: list[int] = []
    weights = read_vision_weights(tiny_checkpoint, steps.append)
    assert sum(steps) == weight_bytes(tiny_checkpoint) == sum(tensor.nbytes for tensor in weights.tensors.values())


def test_every_missing_file_is_named_before_anything_is_read(checkpoint: Path) -> None:
    files = sorted(vision_files(checkpoint))
    assert len(files) >= 2, "the vision tensors lie in one shard; the test shows nothing"
    for file in files:
        (checkpoint / file).unlink()
    with pytest.raises(WeightsError) as caught:
        read_vision_weights(checkpoint)
    assert all(file in str(caught.value) for file in files)


def test_name_absent_from_its_file(checkpoint: Path) -> None:
    file = sorted(vision_files(checkpoint))[0]
    change_index(checkpoint, **{VISION_PREFIX + "ghost": file})
    with pytest.raises(WeightsError, match=rf"{file} lacks.*ghost"):
        read_vision_weights(checkpoint)


def test_index_decides_between_two_owners(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = vision_files(checkpoint)
    owner, names = sorted(files.items())[0]
    name = names[0]
    other = next(file for file in files if file != owner)
    tensors = load_file(checkpoint / other)
    tensors[name] = load_file(checkpoint / owner)[name] + 1
    before = read_vision_weights(checkpoint).digest
    save_file(tensors, checkpoint / other)
    save_file({name: tensors[name]}, checkpoint / "model.safetensors")
    assert read_vision_weights(checkpoint).digest == before
    assert caplog.records[-1].files == ["model.safetensors"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": 1}', b"\xff"])
def test_unreadable_index(checkpoint: Path, content: bytes) -> None:
    (checkpoint / INDEX).write_bytes(content)
    with pytest.raises(WeightsError, match="is no weight index"):
        read_vision_weights(checkpoint)


def test_index_cannot_leave_its_folder(checkpoint: Path) -> None:
    change_index(checkpoint, **{VISION_PREFIX + "ghost": "../model-00001-of-00007.safetensors"})
    with pytest.raises(WeightsError, match=r"outside its folder: \.\./model-00001"):
        read_vision_weights(checkpoint)


def test_cut_file(checkpoint: Path) -> None:
    file = sorted(vision_files(checkpoint))[0]
    content = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(content[:-1])
    with pytest.raises(WeightsError, match=file):
        read_vision_weights(checkpoint)


def test_single_file_checkpoint(checkpoint: Path) -> None:
    whole = read_vision_weights(checkpoint)
    everything = {}
    for file in checkpoint.glob("model-*.safetensors"):
        everything |= load_file(file)
        file.unlink()
    (checkpoint / INDEX).unlink()
    save_file(everything, checkpoint / "model.safetensors")
    assert read_vision_weights(checkpoint).digest == whole.digest


def test_checkpoint_without_vision(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightsError, match=r"no tensor whose name starts with model\.visual\."):
        read_vision_weights(checkpoint)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="neither"):
        read_vision_weights(tmp_path)


def test_digest_follows_one_changed_value(checkpoint: Path) -> None:
    before = read_vision_weights(checkpoint).digest
    file, names = sorted(vision_files(checkpoint).items())[0]
    tensors = load_file(checkpoint / file)
    tensors[names[0]].view(-1)[0] += 1
    save_file(tensors, checkpoint / file)
    assert read_vision_weights(checkpoint).digest != before
