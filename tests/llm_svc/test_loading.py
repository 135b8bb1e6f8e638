"""Which bytes become which weight: the index decides, and whatever is wrong stops the start by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_svc.loading import LoadError, load_model
from llm_svc.settings import LlmSettings
from svc_common.checkpoint import INDEX_NAME

NORM = "model.language_model.norm.weight"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def weight_map(checkpoint: Path) -> dict[str, str]:
    return json.loads((checkpoint / INDEX_NAME).read_text())["weight_map"]


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def norm_of(checkpoint: Path, tier: str) -> torch.Tensor:
    loaded = load_model(LlmSettings(model=str(checkpoint), block_size=16, tier=tier))
    model = loaded.runner._model
    norm = model.language_model.norm if tier == "native" else model.model.language_model.norm
    return norm.weight


@pytest.mark.parametrize("tier", ["native", "upstream"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_copy_in_a_file_that_does_not_own_the_tensor_is_not_used(checkpoint: Path, tier: str, place: str) -> None:
    owners = weight_map(checkpoint)
    right = load_file(checkpoint / owners[NORM])[NORM]
    others = sorted(set(owners.values()) - {owners[NORM]})
    other = checkpoint / (others[0] if place == "first" else others[-1])
    rewrite(other, lambda tensors: tensors.update({NORM: torch.full_like(right, 7.0)}))
    assert torch.equal(norm_of(checkpoint, tier), right)


@pytest.mark.parametrize("tier", ["native", "upstream"])
def test_a_stray_file_beside_the_shards_is_not_used(checkpoint: Path, tier: str) -> None:
    right = load_file(checkpoint / weight_map(checkpoint)[NORM])[NORM]
    save_file({NORM: torch.full_like(right, 7.0)}, checkpoint / "model.safetensors")
    assert torch.equal(norm_of(checkpoint, tier), right)


def test_one_file_without_an_index(checkpoint: Path) -> None:
    everything: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("model-*.safetensors"):
        everything |= load_file(file)
        file.unlink()
    (checkpoint / INDEX_NAME).unlink()
    save_file(everything, checkpoint / "model.safetensors")
    assert torch.equal(norm_of(checkpoint, "native"), everything[NORM])


def test_progress_ends_at_the_bytes_of_all_tensors(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(LlmSettings(model=str(checkpoint), block_size=16), lambda done, expected: seen.append((done, expected)))
    held = sum(t.nbytes for file in checkpoint.glob("*.safetensors") for t in load_file(file).values())
    assert seen[0] == (0, held) and seen[-1] == (held, held)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_missing_shards_are_all_named(checkpoint: Path) -> None:
    gone = sorted(checkpoint.glob("model-*.safetensors"))[1:3]
    for file in gone:
        file.unlink()
    with pytest.raises(LoadError, match=f"weight files are missing: {gone[0].name}, {gone[1].name}"):
        load_model(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_that_its_file_lacks_is_named(checkpoint: Path) -> None:
    file = weight_map(checkpoint)[NORM]
    rewrite(checkpoint / file, lambda tensors: tensors.pop(NORM))
    with pytest.raises(LoadError, match=f"{file} lacks tensors that the index gives it: {NORM}"):
        load_model(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_that_the_index_lacks_is_named(checkpoint: Path) -> None:
    """Upstream would fill it with random numbers and warn."""
    index = json.loads((checkpoint / INDEX_NAME).read_text())
    del index["weight_map"][NORM]
    (checkpoint / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=rf"missing keys: .*{NORM}"):
        load_model(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_that_the_model_does_not_have_is_named(checkpoint: Path) -> None:
    save_file({"model.language_model.surprise": torch.zeros(3)}, checkpoint / "model-extra.safetensors")
    index = json.loads((checkpoint / INDEX_NAME).read_text())
    index["weight_map"]["model.language_model.surprise"] = "model-extra.safetensors"
    (checkpoint / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"unexpected keys: .*surprise"):
        load_model(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    file = checkpoint / weight_map(checkpoint)[NORM]
    rewrite(file, lambda tensors: tensors.update({NORM: torch.ones(3)}))
    with pytest.raises(LoadError, match=rf"mismatched keys: .*{NORM}"):
        load_model(LlmSettings(model=str(checkpoint), block_size=16))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": "../a.safetensors"}}'])
def test_index_that_is_none_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / INDEX_NAME).write_text(content)
    with pytest.raises(LoadError, match=INDEX_NAME):
        load_model(LlmSettings(model=str(checkpoint), block_size=16))


def test_damaged_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / weight_map(checkpoint)[NORM]
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(LoadError, match=file.name):
        load_model(LlmSettings(model=str(checkpoint), block_size=16))
