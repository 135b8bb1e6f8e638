"""Tensors of a checkpoint as they come out of its stream; each is held until it is taken, once."""

from __future__ import annotations

from typing import Any

import torch

from svc_common.checkpoint_errors import CheckpointError
from svc_common.weight_stream import Progress, StreamedTensor, WeightStream

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class HeldTensor:
    """Stands for a tensor among upstream's weights, the way a safetensors slice does; indexing gives it away."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._shape = list(tensor.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        assert self._tensor is not None, "a weight is taken once"
        taken, self._tensor = self._tensor[place], None
        return taken

    def get_shape(self) -> list[int]:
        """Sides of the tensor, also after it was taken."""
        return self._shape


def stream_tensors(stream: WeightStream, progress: Progress) -> dict[str, HeldTensor]:
    """Every tensor by name, on the CPU, after its bytes were found right. Raises CheckpointError and StoreError."""
    progress(0, stream.expected_bytes)
    return {streamed.name: HeldTensor(_as_tensor(streamed)) for streamed in stream.tensors(progress)}


def _as_tensor(streamed: StreamedTensor) -> torch.Tensor:
    dtype = DTYPES.get(streamed.dtype)
    if dtype is None:
        raise CheckpointError(streamed.file, f"dtype {streamed.dtype} is none we know", streamed.name)
    if not streamed.buffer:
        return torch.empty(streamed.shape, dtype=dtype)
    # A copy, because torch aligns its own memory for vector loads and a buffer of Python is not.
    return torch.frombuffer(streamed.buffer, dtype=dtype).clone().view(streamed.shape)
