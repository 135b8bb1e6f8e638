"""Tensors of a checkpoint as they come out of its stream; each is held until it is taken, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from llm_svc.formats.fp8 import dequantize
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


_CPU = torch.device("cpu")


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


def stream_tensors(
    stream: WeightStream,
    progress: Progress,
    scaled: Mapping[str, str],
    dtype: torch.dtype,
    *,
    device: torch.device = _CPU,
    placed: Collection[str] = (),
) -> dict[str, HeldTensor]:
    """Every tensor by name, on the CPU, after its bytes were found right; FP8 weights as `dtype`, without their scales.

    Those in `placed` go to `device` as they arrive, so that the host never holds them all. `scaled` is FP8 weights to
    their scales. What comes first of such a pair waits as it is for the other, in no more memory than its values will
    take. Raises CheckpointError, StoreError and FormatError.
    """
    progress(0, stream.expected_bytes)
    pairs = {name: (weight, scale) for weight, scale in scaled.items() for name in (weight, scale)}
    held: dict[str, HeldTensor] = {}
    waiting: dict[str, torch.Tensor] = {}
    for streamed in stream.tensors(progress, _allocate if device.type == "cpu" else _allocate_pinned):
        tensor = _as_tensor(streamed)
        if streamed.name in placed:
            tensor = tensor.to(device)
        pair = pairs.get(streamed.name)
        if pair is None:
            held[streamed.name] = HeldTensor(tensor)
            continue
        waiting[streamed.name] = tensor
        del tensor
        if waiting.keys() >= set(pair):
            weight, scale = pair
            held[weight] = HeldTensor(dequantize(pair, waiting.pop(weight), waiting.pop(scale), dtype))
    assert not waiting, f"the stream lacks the other half of {sorted(waiting)}"
    return held


def _as_tensor(streamed: StreamedTensor) -> torch.Tensor:
    dtype = DTYPES.get(streamed.dtype)
    if dtype is None:
        raise CheckpointError(streamed.file, f"dtype {streamed.dtype} is none we know", streamed.name)
    if not streamed.buffer:
        return torch.empty(streamed.shape, dtype=dtype)
    return torch.frombuffer(streamed.buffer, dtype=dtype).view(streamed.shape)


def _allocate(size_bytes: int) -> memoryview:
    """torch's own memory, which it aligns for vector loads; a buffer of Python would have to be copied."""
    return torch.empty(size_bytes, dtype=torch.uint8).numpy().data


def _allocate_pinned(size_bytes: int) -> memoryview:
    """The same, page-locked: a copy to a GPU runs at the bus' speed. torch keeps such memory for the next tensor."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
