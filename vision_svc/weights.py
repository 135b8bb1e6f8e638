"""Reads the vision tensors of a checkpoint and nothing else of it; knows no model class."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from svc_common.checkpoint_errors import CheckpointError
from svc_common.checkpoint_source import CheckpointSource
from svc_common.store_errors import StoreError
from svc_common.weight_stream import Progress, StreamedTensor, WeightStream

VISION_PREFIX = "model.visual."

# A quantised tensor would be cast without its scales: right shape, wrong numbers.
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What a vision tensor may be, by the name the safetensors format has for it."""


class WeightsError(Exception):
    """The checkpoint cannot give the vision weights; the message names files and tensors."""


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Tensors by name without the prefix, the files they came from, and sha256 over names, dtypes, shapes, bytes."""

    tensors: dict[str, torch.Tensor]
    files: tuple[str, ...]
    digest: bytes


def read_vision_weights(source: CheckpointSource, progress: Progress | None = None) -> VisionWeights:
    """Reads every vision tensor once, on the CPU; `progress` first hears of 0 bytes, then of each piece.

    Raises WeightsError when a file is missing or damaged or is not what the manifest covers, lacks a tensor that the
    index says it has, or has one of another dtype than DTYPES.
    """
    found: dict[str, torch.Tensor] = {}
    try:
        stream = source.weights(lambda name: name.startswith(VISION_PREFIX))
        _check_dtypes(stream)
        if progress is not None:
            progress(0, stream.expected_bytes)
        for streamed in stream.tensors(progress, _allocate):
            found[streamed.name.removeprefix(VISION_PREFIX)] = _as_tensor(streamed)
    except (CheckpointError, StoreError) as error:
        raise WeightsError(f"vision weights ({VISION_PREFIX}*): {error}") from error
    digest = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return VisionWeights(found, stream.files, digest.digest())


def _check_dtypes(stream: WeightStream) -> None:
    problems = [
        f"tensor {span.name!r} has dtype {span.dtype}, expected one of {', '.join(DTYPES)}"
        for span in stream.spans.values()
        if span.dtype not in DTYPES
    ]
    if problems:
        raise WeightsError("; ".join(problems))


def _as_tensor(streamed: StreamedTensor) -> torch.Tensor:
    dtype = DTYPES[streamed.dtype]
    if not streamed.buffer:
        return torch.empty(streamed.shape, dtype=dtype)
    return torch.frombuffer(streamed.buffer, dtype=dtype).view(streamed.shape)


def _allocate(size_bytes: int) -> memoryview:
    """torch's own memory: it has one alignment, a buffer of Python none, and bits may depend on it."""
    return torch.empty(size_bytes, dtype=torch.uint8).numpy().data
