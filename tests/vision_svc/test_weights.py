"""Only vision tensors are read, the index decides, and every problem names files and tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from svc_common.digests import make_manifest
from svc_common.manifest import write_manifest
from svc_common.object_store import ObjectStore
from tests.checkpoints import flip
from tests.vision_svc.checkpoints import INDEX, encoder_of, opened, vision_files, weights_of
from vision_svc.weights import VISION_PREFIX, WeightsError, read_vision_weights


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def change_index(checkpoint: Path, **owners: str) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"] |= owners
    (checkpoint / INDEX).write_text(json.dumps(index))


def test_language_tensors_are_neither_read_nor_needed(checkpoint: Path) -> None:
    whole = weights_of(checkpoint)
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
    again = weights_of(checkpoint)
    assert again.digest == whole.digest
    assert set(again.tensors) == {
        name.removeprefix(VISION_PREFIX) for name in weight_map if name.startswith(VISION_PREFIX)
    }
    assert set(again.files).isdisjoint(only_text)


def test_progress_reaches_the_expected_bytes(tiny_checkpoint: Path) -> None:
    steps: list[tuple[int, int]] = []
    with opened(tiny_checkpoint) as source:
        weights = read_vision_weights(source, lambda done, expected: steps.append((done, expected)))
    total = sum(tensor.nbytes for tensor in weights.tensors.values())
    assert steps[0] == (0, total) and steps[-1] == (total, total)
    assert steps == sorted(steps) and {expected for _, expected in steps} == {total}


def test_tensors_are_those_of_the_safetensors_library(tiny_checkpoint: Path) -> None:
    weights = weights_of(tiny_checkpoint)
    for file, names in vision_files(tiny_checkpoint).items():
        right = load_file(tiny_checkpoint / file)
        for name in names:
            ours = weights.tensors[name.removeprefix(VISION_PREFIX)]
            assert ours.dtype == right[name].dtype and torch.equal(ours, right[name])


def test_empty_and_scalar_tensors(checkpoint: Path) -> None:
    file = sorted(vision_files(checkpoint))[0]
    extra = {VISION_PREFIX + "empty": torch.ones(0, 8), VISION_PREFIX + "scalar": torch.tensor(2.5)}
    save_file(load_file(checkpoint / file) | extra, checkpoint / file)
    change_index(checkpoint, **dict.fromkeys(extra, file))
    tensors = weights_of(checkpoint).tensors
    assert tensors["empty"].shape == (0, 8) and tensors["scalar"].shape == () and tensors["scalar"] == 2.5


def test_other_dtype_is_refused_by_name(checkpoint: Path) -> None:
    file = sorted(vision_files(checkpoint))[0]
    name = VISION_PREFIX + "packed"
    save_file(load_file(checkpoint / file) | {name: torch.ones(4, dtype=torch.uint8)}, checkpoint / file)
    change_index(checkpoint, **{name: file})
    with pytest.raises(WeightsError, match=r"tensor 'model\.visual\.packed' has dtype U8, expected one of F32"):
        weights_of(checkpoint)


def test_the_tower_of_an_fp8_checkpoint_is_read_where_it_is_not_quantised(checkpoint: Path) -> None:
    before = weights_of(checkpoint)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.visual"]}
    config = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": quantization}
    (checkpoint / "config.json").write_text(json.dumps(config))
    file = next(
        file for file, names in vision_files(checkpoint).items() if len(load_file(checkpoint / file)) > len(names)
    )
    tensors = load_file(checkpoint / file)
    text = next(name for name, tensor in tensors.items() if not name.startswith(VISION_PREFIX) and tensor.dim() == 2)
    scales = torch.ones([-(-side // 128) for side in tensors[text].shape])
    tensors |= {text: tensors[text].to(torch.float8_e4m3fn), f"{text}_scale_inv": scales}
    save_file(tensors, checkpoint / file)
    change_index(checkpoint, **{f"{text}_scale_inv": file})
    assert weights_of(checkpoint).digest == before.digest
    encoder_of(checkpoint)


def test_a_quantised_tower_is_refused_by_name(checkpoint: Path) -> None:
    """Read by itself a code would be cast without its scale: right shape, wrong numbers."""
    file, names = sorted(vision_files(checkpoint).items())[0]
    name = next(name for name in names if name.endswith("weight"))
    tensors = load_file(checkpoint / file)
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, checkpoint / file)
    change_index(checkpoint, **{f"{name}_scale_inv": file})
    with pytest.raises(WeightsError, match=rf"tensor '{name}' has dtype F8_E4M3, expected one of F32, BF16, F16"):
        weights_of(checkpoint)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_flipped_byte_is_found_by_the_manifest(checkpoint: Path, with_manifest: bool) -> None:
    file, names = sorted(vision_files(checkpoint).items())[0]
    before = weights_of(checkpoint)
    if with_manifest:
        store = ObjectStore(str(checkpoint))
        write_manifest(store, make_manifest(store))
    with opened(checkpoint) as source:
        span = source.weights(lambda name: name == names[0]).spans[names[0]]
    flip(checkpoint / file, span.start)
    if with_manifest:
        with pytest.raises(WeightsError, match=rf"{file}: tensor '{names[0]}': wrong bytes"):
            weights_of(checkpoint)
    else:
        assert weights_of(checkpoint).digest != before.digest


def test_every_missing_file_is_named_before_anything_is_read(checkpoint: Path) -> None:
    files = sorted(vision_files(checkpoint))
    assert len(files) >= 2, "the vision tensors lie in one shard; the test shows nothing"
    for file in files:
        (checkpoint / file).unlink()
    with pytest.raises(WeightsError) as caught:
        weights_of(checkpoint)
    assert all(file in str(caught.value) for file in files)


def test_name_absent_from_its_file(checkpoint: Path) -> None:
    file = sorted(vision_files(checkpoint))[0]
    change_index(checkpoint, **{VISION_PREFIX + "ghost": file})
    with pytest.raises(
        WeightsError, match=rf"{file}: tensor 'model.visual.ghost': the index gives it to this file, which lacks it"
    ):
        weights_of(checkpoint)


def test_index_decides_between_two_owners(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = vision_files(checkpoint)
    owner, names = sorted(files.items())[0]
    name = names[0]
    other = next(file for file in files if file != owner)
    tensors = load_file(checkpoint / other)
    tensors[name] = load_file(checkpoint / owner)[name] + 1
    before = weights_of(checkpoint).digest
    save_file(tensors, checkpoint / other)
    save_file({name: tensors[name]}, checkpoint / "model.safetensors")
    assert weights_of(checkpoint).digest == before
    assert caplog.records[-1].files == ["model.safetensors"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": 1}', b"\xff"])
def test_unreadable_index(checkpoint: Path, content: bytes) -> None:
    (checkpoint / INDEX).write_bytes(content)
    with pytest.raises(WeightsError, match=rf"{INDEX}: (is no weight index|its weight_map maps no)"):
        weights_of(checkpoint)


def test_index_cannot_leave_its_folder(checkpoint: Path) -> None:
    change_index(checkpoint, **{VISION_PREFIX + "ghost": "../model-00001-of-00007.safetensors"})
    with pytest.raises(WeightsError, match=r"ghost': '\.\./model-00001.*is no \.safetensors file beside it"):
        weights_of(checkpoint)


def test_cut_file(checkpoint: Path) -> None:
    file = sorted(vision_files(checkpoint))[0]
    content = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(content[:-1])
    with pytest.raises(WeightsError, match=file):
        weights_of(checkpoint)


def test_single_file_checkpoint(checkpoint: Path) -> None:
    whole = weights_of(checkpoint)
    everything = {}
    for file in checkpoint.glob("model-*.safetensors"):
        everything |= load_file(file)
        file.unlink()
    (checkpoint / INDEX).unlink()
    save_file(everything, checkpoint / "model.safetensors")
    assert weights_of(checkpoint).digest == whole.digest


def test_checkpoint_without_vision(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightsError, match=r"\(model\.visual\.\*\).*has none of the tensors"):
        weights_of(checkpoint)


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="neither"):
        weights_of(tmp_path)


def test_digest_follows_one_changed_value(checkpoint: Path) -> None:
    before = weights_of(checkpoint).digest
    file, names = sorted(vision_files(checkpoint).items())[0]
    tensors = load_file(checkpoint / file)
    tensors[names[0]].view(-1)[0] += 1
    save_file(tensors, checkpoint / file)
    assert weights_of(checkpoint).digest != before
