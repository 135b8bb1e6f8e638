"""Reads and writes checkpoints whole, for tests that change their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from svc_common.checkpoint import INDEX_NAME
from svc_common.manifest import MANIFEST_NAME

Tensors = dict[str, torch.Tensor]


def read(checkpoint: Path) -> Tensors:
    return {name: t for file in sorted(checkpoint.glob("*.safetensors")) for name, t in load_file(file).items()}


def write(source: Path, target: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    """The checkpoint `source` with other weights, in one file."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME, MANIFEST_NAME))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))
    return target
