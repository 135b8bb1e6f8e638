"""The digests of a checkpoint: what they are as a file, how they are made, and how a checkpoint is checked by them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import DigestMismatch, ManifestFault
from svc_common.object_store import ObjectStore, StoredFile
from svc_common.strict_json import parse_strict_json

MANIFEST_NAME = "day0-manifest.json"
CONFIG_NAME = "config.json"
FORMAT = "day0-manifest/1"
_MAX_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """What the manifest knows of one tensor in one file; `sha256` is hexadecimal, over its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What the manifest knows of one file; weight files alone have `header_sha256` (length and header) and tensors."""

    size_bytes: int
    sha256: str
    header_sha256: str | None = None
    tensors: Mapping[str, TensorDigest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Digests of the files that a service may read; `index_sha256` is None for a checkpoint of one weight file."""

    config_sha256: str
    index_sha256: str | None
    files: Mapping[str, FileDigest]

    def to_json(self) -> bytes:
        """The file's bytes: the same manifest always gives the same."""
        files = {name: _file_entry(digest) for name, digest in sorted(self.files.items())}
        document = {
            "format": FORMAT,
            "config_sha256": self.config_sha256,
            "index_sha256": self.index_sha256,
            "files": files,
        }
        return json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n"

    @property
    def sha256(self) -> str:
        """Hexadecimal; stands for every byte of the checkpoint."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def file(self, name: str) -> FileDigest:
        """Raises ManifestFault for a file it does not cover."""
        if name not in self.files:
            raise ManifestFault(MANIFEST_NAME, f"does not cover the file {name}")
        return self.files[name]

    def check_content(self, name: str, content: bytes) -> None:
        """Raises DigestMismatch unless these are all bytes of the file, and ManifestFault for an unknown file."""
        check_digest(name, "file", self.file(name).sha256, hashlib.sha256(content).hexdigest())

    def check_header(self, name: str, content: bytes) -> None:
        """Raises DigestMismatch unless these are a weight file's length and header, and ManifestFault."""
        expected = self.file(name).header_sha256
        if expected is None:
            raise ManifestFault(MANIFEST_NAME, f"has no tensors of the weight file {name}")
        check_digest(name, "header", expected, hashlib.sha256(content).hexdigest())

    def check_size(self, file: StoredFile) -> None:
        """Raises DigestMismatch when a listed file has another size, and ManifestFault for an unknown file."""
        expected = self.file(file.name).size_bytes
        if file.size_bytes != expected:
            raise DigestMismatch(file.name, f"it has {file.size_bytes} bytes, the manifest has {expected}")


def check_digest(file: str, part: str, expected: str, actual: str, tensor: str | None = None) -> None:
    """Raises DigestMismatch, naming the part, when two hexadecimal digests differ."""
    if expected != actual:
        raise DigestMismatch(
            file, f"wrong bytes: sha256 of the {part} is {actual}, the manifest has {expected}", tensor
        )


def parse_manifest(content: bytes) -> Manifest:
    """Raises ManifestFault for anything that `Manifest.to_json` would not have written."""
    try:
        document = parse_strict_json(content)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        files = {name: _file_digest(entry) for name, entry in document["files"].items()}
        manifest = Manifest(
            _sha256(document["config_sha256"]),
            None if document["index_sha256"] is None else _sha256(document["index_sha256"]),
            files,
        )
        for name, sha256 in ((CONFIG_NAME, manifest.config_sha256), (INDEX_NAME, manifest.index_sha256)):
            if sha256 != (files[name].sha256 if name in files else None):
                raise ValueError(f"it has two digests of {name}")
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestFault(MANIFEST_NAME, f"is no manifest: {error!r}") from error


def read_manifest(store: ObjectStore, listed: Mapping[str, StoredFile]) -> Manifest:
    """The manifest beside the checkpoint; raises ManifestFault and StoreError."""
    if MANIFEST_NAME not in listed:
        raise ManifestFault(MANIFEST_NAME, f"is not in {store.uri}; `day0 manifest` makes it")
    if listed[MANIFEST_NAME].size_bytes > _MAX_BYTES:
        raise ManifestFault(
            MANIFEST_NAME, f"{listed[MANIFEST_NAME].size_bytes} bytes are above the limit of {_MAX_BYTES}"
        )
    return parse_manifest(store.read(listed[MANIFEST_NAME]))


def write_manifest(store: ObjectStore, manifest: Manifest) -> None:
    """Writes it beside the checkpoint, whole or not at all; raises StoreError."""
    store.write(MANIFEST_NAME, manifest.to_json())


def _file_entry(digest: FileDigest) -> dict[str, Any]:
    entry: dict[str, Any] = {"bytes": digest.size_bytes, "sha256": digest.sha256}
    if digest.header_sha256 is not None:
        entry["header_sha256"] = digest.header_sha256
        entry["tensors"] = {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.size_bytes,
                "sha256": tensor.sha256,
            }
            for name, tensor in sorted(digest.tensors.items())
        }
    return entry


def _file_digest(entry: Any) -> FileDigest:
    tensors = {
        name: TensorDigest(
            _text(tensor["dtype"]),
            tuple(_count(side) for side in tensor["shape"]),
            _count(tensor["bytes"]),
            _sha256(tensor["sha256"]),
        )
        for name, tensor in entry.get("tensors", {}).items()
    }
    header = _sha256(entry["header_sha256"]) if "header_sha256" in entry else None
    return FileDigest(_count(entry["bytes"]), _sha256(entry["sha256"]), header, tensors)


def _count(item: Any) -> int:
    if type(item) is not int or item < 0:
        raise ValueError(f"{item!r} is no count")
    return item


def _text(item: Any) -> str:
    if not isinstance(item, str):
        raise ValueError(f"{item!r} is no text")
    return item


def _sha256(item: Any) -> str:
    if not isinstance(item, str) or len(item) != 64 or not set(item) <= set("0123456789abcdef"):
        raise ValueError(f"{item!r} is no hexadecimal sha256")
    return item
