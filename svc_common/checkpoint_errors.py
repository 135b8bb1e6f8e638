"""What can be wrong with a checkpoint, one class for each fault; knows neither stores nor formats."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """The checkpoint must not be served; the message names the file and, where one is at fault, the tensor."""

    def __init__(self, file: str, problem: str, tensor: str | None = None) -> None:
        self.file = file
        self.tensor = tensor
        self.problem = problem
        super().__init__(f"{file}: {'' if tensor is None else f'tensor {tensor!r}: '}{problem}")


class HeaderError(CheckpointError):
    """The file is no valid safetensors file."""


class IndexFault(CheckpointError):
    """The index cannot be used, or there is nothing it could stand for."""


class ManifestFault(CheckpointError):
    """The manifest cannot be used, or does not cover what is to be read."""


class ShardsMissing(CheckpointError):
    """Files that the index names are not there; `files` has all of them."""

    def __init__(self, index_file: str, files: Sequence[str]) -> None:
        self.files = tuple(files)
        super().__init__(index_file, f"weight files are missing: {', '.join(files)}")


class TensorAbsent(CheckpointError):
    """A file lacks a tensor that the index says it has."""


class DigestMismatch(CheckpointError):
    """Bytes other than those the manifest was made of."""
