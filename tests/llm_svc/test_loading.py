"""Which bytes become which weight: the index decides, and whatever is wrong stops the start by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_svc.build import LoadError
from llm_svc.settings import LlmSettings
from svc_common.checkpoint import INDEX_NAME
from svc_common.digests import make_manifest
from svc_common.manifest import write_manifest
from svc_common.object_store import ObjectStore
from tests.checkpoints import flip
from tests.llm_svc.checkpoints import load

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
    loaded = load(LlmSettings(model=str(checkpoint), block_size=16, tier=tier))
    model = loaded.runner.model
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
    load(LlmSettings(model=str(checkpoint), block_size=16), lambda done, expected: seen.append((done, expected)))
    held = sum(
        tensor.nbytes
        for file in checkpoint.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if not name.startswith("model.visual.")
    )
    assert seen[0] == (0, held) and seen[-1] == (held, held)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_vision_tensors_are_neither_read_nor_needed(checkpoint: Path) -> None:
    owners = weight_map(checkpoint)
    text_files = {file for name, file in owners.items() if not name.startswith("model.visual.")}
    only_vision = set(owners.values()) - text_files
    assert only_vision, "no shard holds vision tensors alone; the test shows nothing"
    for file in only_vision:
        (checkpoint / file).unlink()
    assert torch.isfinite(norm_of(checkpoint, "native")).all()


def test_flipped_byte_is_named_with_file_and_tensor(checkpoint: Path) -> None:
    store = ObjectStore(str(checkpoint))
    write_manifest(store, make_manifest(store))
    load(LlmSettings(model=str(checkpoint), block_size=16, require_manifest=True))
    file = checkpoint / weight_map(checkpoint)[NORM]
    flip(file, _place(file, NORM))
    with pytest.raises(LoadError, match=rf"{file.name}: tensor '{NORM}': wrong bytes"):
        load(LlmSettings(model=str(checkpoint), block_size=16))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX_NAME])
def test_flipped_byte_of_a_small_file_is_named(checkpoint: Path, name: str) -> None:
    store = ObjectStore(str(checkpoint))
    write_manifest(store, make_manifest(store))
    flip(checkpoint / name, -2)
    with pytest.raises(LoadError, match=rf"{name}: wrong bytes"):
        load(LlmSettings(model=str(checkpoint), block_size=16))


def test_manifest_can_be_demanded(checkpoint: Path) -> None:
    with pytest.raises(LoadError, match=r"day0-manifest\.json: is not in .*`day0 manifest` makes it"):
        load(LlmSettings(model=str(checkpoint), block_size=16, require_manifest=True))


def _place(file: Path, name: str) -> int:
    """Offset of a tensor's first byte."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return 8 + length + json.loads(content[8 : 8 + length])[name]["data_offsets"][0]


def test_missing_shards_are_all_named(checkpoint: Path) -> None:
    gone = sorted(checkpoint.glob("model-*.safetensors"))[1:3]
    for file in gone:
        file.unlink()
    with pytest.raises(LoadError, match=f"weight files are missing: {gone[0].name}, {gone[1].name}"):
        load(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_that_its_file_lacks_is_named(checkpoint: Path) -> None:
    file = weight_map(checkpoint)[NORM]
    rewrite(checkpoint / file, lambda tensors: tensors.pop(NORM))
    with pytest.raises(LoadError, match=rf"{file}: tensor '{NORM}': the index gives it to this file"):
        load(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_that_the_index_lacks_is_named(checkpoint: Path) -> None:
    """Upstream would fill it with random numbers and warn."""
    index = json.loads((checkpoint / INDEX_NAME).read_text())
    del index["weight_map"][NORM]
    (checkpoint / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=rf"missing keys: .*{NORM}"):
        load(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_that_the_model_does_not_have_is_named(checkpoint: Path) -> None:
    save_file({"model.language_model.surprise": torch.zeros(3)}, checkpoint / "model-extra.safetensors")
    index = json.loads((checkpoint / INDEX_NAME).read_text())
    index["weight_map"]["model.language_model.surprise"] = "model-extra.safetensors"
    (checkpoint / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"unexpected keys: .*surprise"):
        load(LlmSettings(model=str(checkpoint), block_size=16))


def test_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    file = checkpoint / weight_map(checkpoint)[NORM]
    rewrite(file, lambda tensors: tensors.update({NORM: torch.ones(3)}))
    with pytest.raises(LoadError, match=rf"mismatched keys: .*{NORM}"):
        load(LlmSettings(model=str(checkpoint), block_size=16))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": "../a.safetensors"}}'])
def test_index_that_is_none_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / INDEX_NAME).write_text(content)
    with pytest.raises(LoadError, match=INDEX_NAME):
        load(LlmSettings(model=str(checkpoint), block_size=16))


def test_damaged_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / weight_map(checkpoint)[NORM]
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(LoadError, match=file.name):
        load(LlmSettings(model=str(checkpoint), block_size=16))
