"""Small checkpoints for tests, written without a tensor library, and ways to damage them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from svc_common.safetensors_header import DTYPE_BITS

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

Entries = Mapping[str, tuple[str, tuple[int, ...]]]

SHARDS: Mapping[str, Entries] = {
    A: {"text.embed": ("BF16", (40, 16)), "text.empty": ("F32", (0, 8)), "visual.scale": ("F8_E8M0", (3,))},
    B: {"text.head": ("F32", (30, 8)), "visual.odd": ("U8", (5,)), "visual.proj": ("F16", (25, 4))},
}


def write_safetensors(path: Path, entries: Entries, seed: int = 0) -> dict[str, bytes]:
    """Writes random bytes for each entry, in its order; returns them by name."""
    source = random.Random(f"{path.name} {seed}")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    contents: dict[str, bytes] = {}
    position = 0
    for name, (dtype, shape) in entries.items():
        size_bits = DTYPE_BITS[dtype]
        for side in shape:
            size_bits *= side
        contents[name] = source.randbytes(size_bits // 8)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size_bits // 8]}
        position += size_bits // 8
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(contents.values()))
    return contents


def write_checkpoint(folder: Path) -> dict[str, bytes]:
    """Two shards, an index, a configuration; returns the bytes of each tensor."""
    contents: dict[str, bytes] = {}
    for file, entries in SHARDS.items():
        contents |= write_safetensors(folder / file, entries)
    write_index(folder, {name: file for file, entries in SHARDS.items() for name in entries})
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "README.md").write_text("not covered")
    return contents


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def flip(path: Path, offset: int) -> None:
    """Inverts the lowest bit of one byte; a negative offset counts from the end."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
