"""Reads and writes one safetensors file of a checkpoint whose routed experts become MXFP4; it knows no folder.

Memory is some rows of one matrix and what encoding them takes, whatever the file's size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from day0.expert_names import ExpertMatrix, expert_matrices
from day0_kernels.mxfp4 import GROUP_SIZE, decode, encode
from svc_common.errors import InvalidArgument
from svc_common.safetensors_header import (
    LENGTH_BYTES,
    SafetensorsHeader,
    TensorSpan,
    header_length,
    parse_header,
)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_COPY_BYTES = 1 << 22
_ROWS_ELEMENTS = 1 << 18


@dataclass(slots=True)
class Errors:
    """Sums over some experts: bytes before and after, squares of the weights and of what encoding changed."""

    bytes_before: int = 0
    bytes_after: int = 0
    squared_error: float = 0.0
    squared_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of weights, its header checked, and the experts in it by tensor name."""

    path: Path
    header: SafetensorsHeader
    experts: dict[str, tuple[ExpertMatrix, ...]]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(span.size_bytes for span in self.header.tensors.values())


def open_shard(path: Path) -> Shard:
    """The file at `path`; HeaderError where it is broken, InvalidArgument for an expert that cannot be MXFP4."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = header_length(file.read(LENGTH_BYTES), size, str(path))
        header = parse_header(file.read(length), size, str(path))
    experts = {}
    for name, span in header.tensors.items():
        matrices = expert_matrices(name, span.shape)
        if not matrices:
            continue
        if span.dtype not in _DTYPES:
            raise InvalidArgument("cannot be MXFP4", field=name, limit=", ".join(sorted(_DTYPES)), value=span.dtype)
        if span.shape[-1] % GROUP_SIZE or not span.shape[-1]:
            raise InvalidArgument(
                "cannot be MXFP4", field=name, limit=f"columns in groups of {GROUP_SIZE}", value=str(list(span.shape))
            )
        experts[name] = matrices
    return Shard(path, header, experts)


def layout_of(shard: Shard) -> dict[str, TensorSpan]:
    """Tensors of the new file in the library's order, wide dtypes first; spans count from its data."""
    planned: list[tuple[str, str, tuple[int, ...], int]] = []
    for name, span in shard.header.tensors.items():
        if name not in shard.experts:
            planned.append((name, span.dtype, span.shape, span.size_bytes))
            continue
        for matrix in shard.experts[name]:
            widths = {"weight_packed": matrix.columns // 2, "weight_scale": matrix.columns // GROUP_SIZE}
            for suffix, width in widths.items():
                planned.append((f"{matrix.module}.{suffix}", "U8", (matrix.rows, width), matrix.rows * width))
    planned.sort(key=lambda entry: (-_element_bytes(entry), entry[0]))
    layout, begin = {}, 0
    for name, dtype, shape, size in planned:
        layout[name] = TensorSpan(name, dtype, shape, begin, begin + size)
        begin += size
    return layout


def _element_bytes(entry: tuple[str, str, tuple[int, ...], int]) -> int:
    digits = re.search(r"\d+", entry[1])
    return int(digits[0]) if digits else 8


def write_shard(shard: Shard, layout: dict[str, TensorSpan], path: Path, errors: dict[str, Errors]) -> Iterator[int]:
    """Writes the file that `layout` plans to `path`, yielding how many bytes of the source each step has done.

    `errors` is by the prefix of the experts, and is added to.
    """
    entries: dict[str, Any] = {"__metadata__": dict(shard.header.metadata)} if shard.header.metadata else {}
    for name, span in layout.items():
        entries[name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": [span.start, span.stop]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # The data begin at a multiple of 8 bytes, as the library has it.
    text += b" " * (-len(text) % 8)
    start = LENGTH_BYTES + len(text)
    with shard.path.open("rb") as source, path.open("wb") as target:
        target.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name, span in shard.header.tensors.items():
            if name in shard.experts:
                for matrix in shard.experts[name]:
                    yield _write_matrix(source, span, matrix, target, layout, start, errors[matrix.prefix])
                continue
            source.seek(span.start)
            target.seek(start + layout[name].start)
            for begin in range(0, span.size_bytes, _COPY_BYTES):
                count = min(_COPY_BYTES, span.size_bytes - begin)
                target.write(_read(source, count, shard.path))
                yield count


def _write_matrix(
    source: BinaryIO,
    span: TensorSpan,
    matrix: ExpertMatrix,
    target: BinaryIO,
    layout: dict[str, TensorSpan],
    start: int,
    errors: Errors,
) -> int:
    """Encodes one matrix, some rows at a time, into its two places; returns the bytes it had."""
    dtype = _DTYPES[span.dtype]
    packed, scaled = (layout[f"{matrix.module}.{suffix}"] for suffix in ("weight_packed", "weight_scale"))
    source.seek(span.start + matrix.first_element * dtype.itemsize)
    step = max(1, _ROWS_ELEMENTS // matrix.columns)
    for row in range(0, matrix.rows, step):
        count = min(step, matrix.rows - row)
        data = _read(source, count * matrix.columns * dtype.itemsize, Path(source.name))
        x = torch.frombuffer(data, dtype=dtype).view(count, matrix.columns).float()
        try:
            codes, scales = encode(x)
        except ValueError as error:
            raise InvalidArgument(f"{matrix.module}: {error}") from error
        errors.squared_error += float((decode(codes, scales) - x).double().square().sum())
        errors.squared_weight += float(x.double().square().sum())
        for place, tensor in ((packed, codes), (scaled, scales)):
            target.seek(start + place.start + row * tensor.shape[1])
            target.write(_bytes(tensor))
    before = matrix.rows * matrix.columns * dtype.itemsize
    errors.bytes_before += before
    errors.bytes_after += packed.size_bytes + scaled.size_bytes
    return before


def _read(file: BinaryIO, count: int, path: Path) -> bytearray:
    data = bytearray(file.read(count))
    if len(data) != count:
        raise InvalidArgument(f"{path} became shorter while it was read")
    return data


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
