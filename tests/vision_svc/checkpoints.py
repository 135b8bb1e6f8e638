"""Opens checkpoints and finds their vision tensors the slow and obvious way, for the tests of this folder."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from svc_common.checkpoint_source import CheckpointSource
from vision_svc.encoder import Encoder
from vision_svc.weights import VISION_PREFIX, VisionWeights, read_vision_weights

INDEX = "model.safetensors.index.json"


def vision_files(checkpoint: Path) -> dict[str, list[str]]:
    """The full names of the vision tensors of each file that has any, as the index gives them."""
    found = defaultdict(list)
    for name, file in json.loads((checkpoint / INDEX).read_text())["weight_map"].items():
        if name.startswith(VISION_PREFIX):
            found[file].append(name)
    return dict(found)


@contextmanager
def opened(checkpoint: Path) -> Iterator[CheckpointSource]:
    source = CheckpointSource(os.fspath(checkpoint))
    try:
        yield source
    finally:
        source.close()


def weights_of(checkpoint: Path) -> VisionWeights:
    with opened(checkpoint) as source:
        return read_vision_weights(source)


def encoder_of(checkpoint: Path, *, dtype: str = "float32", batch_invariant: bool = True) -> Encoder:
    with opened(checkpoint) as source:
        return Encoder(source, dtype=dtype, batch_invariant=batch_invariant)
