"""Reads the vision tensors of a checkpoint and nothing else of it; knows no model class."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from svc_common.logs import get_logger

_log = get_logger("day0.vision.weights")

VISION_PREFIX = "model.visual."
_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


class WeightsError(Exception):
    """The checkpoint cannot give the vision weights; the message names files and tensors."""


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Tensors by name without the prefix, the files they came from, and sha256 over names, dtypes, shapes, bytes."""

    tensors: dict[str, torch.Tensor]
    files: tuple[str, ...]
    digest: bytes


def vision_files(checkpoint: Path) -> dict[str, list[str]]:
    """Maps each weight file that holds vision tensors to the full names of those tensors.

    The index decides which file owns a tensor. Every missing file is named before anything is read.
    Raises WeightsError.
    """
    index_path = checkpoint / _INDEX_NAME
    by_file: dict[str, list[str]] = defaultdict(list)
    if index_path.exists():
        for name, file in _weight_map(index_path).items():
            if name.startswith(VISION_PREFIX):
                by_file[file].append(name)
    elif (checkpoint / _SINGLE_NAME).exists():
        with _open(checkpoint / _SINGLE_NAME) as tensors:
            by_file[_SINGLE_NAME] = [name for name in tensors.keys() if name.startswith(VISION_PREFIX)]  # noqa: SIM118
    else:
        raise WeightsError(f"{checkpoint} has neither {_INDEX_NAME} nor {_SINGLE_NAME}")
    missing = sorted(file for file in by_file if not (checkpoint / file).is_file())
    if missing:
        raise WeightsError(f"weight files are missing in {checkpoint}: {', '.join(missing)}")
    if not any(by_file.values()):
        raise WeightsError(f"{checkpoint} has no tensor whose name starts with {VISION_PREFIX}")
    return dict(by_file)


def weight_bytes(checkpoint: Path) -> int:
    """Size in bytes of all vision tensors, from the file headers alone."""
    total = 0
    for file, names in vision_files(checkpoint).items():
        with _open(checkpoint / file) as tensors:
            for name in _present(tensors, names, file):
                view = tensors.get_slice(name)
                count = 1
                for side in view.get_shape():
                    count *= side
                total += count * _ITEM_BYTES.get(view.get_dtype(), 0)
    return total


def read_vision_weights(checkpoint: Path, progress: Callable[[int], None] | None = None) -> VisionWeights:
    """Reads every vision tensor once, on the CPU; `progress` is told the bytes of each one.

    Raises WeightsError when a file is missing or damaged, or lacks a tensor that the index says it has.
    """
    by_file = vision_files(checkpoint)
    found: dict[str, torch.Tensor] = {}
    for file, names in sorted(by_file.items()):
        with _open(checkpoint / file) as tensors:
            for name in _present(tensors, names, file):
                tensor = tensors.get_tensor(name)
                found[name.removeprefix(VISION_PREFIX)] = tensor
                if progress is not None:
                    progress(tensor.nbytes)
    digest = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return VisionWeights(found, tuple(sorted(by_file)), digest.digest())


def _weight_map(index_path: Path) -> dict[str, str]:
    """Tensor name to file name, as the index has it."""
    try:
        weight_map = json.loads(index_path.read_bytes())["weight_map"]
        owners = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index_path.name} is no weight index: {error!r}") from error
    outside = sorted({file for file in owners.values() if Path(file).name != file})
    if outside:
        raise WeightsError(f"{index_path.name} names files outside its folder: {', '.join(outside)}")
    strays = {path.name for path in index_path.parent.glob("*.safetensors")} - set(owners.values())
    if strays:
        _log.warning("weight files that the index does not name are ignored", extra={"files": sorted(strays)})
    return owners


_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path.name} is no readable weight file: {error}") from error


def _present(tensors: safe_open, names: list[str], file: str) -> list[str]:
    absent = sorted(set(names) - set(tensors.keys()))
    if absent:
        raise WeightsError(f"{file} lacks tensors that the index gives it: {', '.join(absent)}")
    return sorted(names)
