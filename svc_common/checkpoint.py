"""Names a checkpoint folder and the software beside it; knows no format of weights."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"


def checkpoint_digest(folder: Path) -> str:
    """Hexadecimal sha256 over the configuration, the index, and the weight files' names and sizes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    index = folder / INDEX_NAME
    if index.is_file():
        digest.update(index.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
    return digest.hexdigest()


def versions_of(*distributions: str) -> dict[str, str]:
    """Installed version of each distribution, for ModelInfo; a source tree that is not installed says so."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
