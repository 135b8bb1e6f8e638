"""The tensors of a checkpoint folder, each from the file that the index gives it to; knows no model."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors import SafetensorError, safe_open

from svc_common.checkpoint import INDEX_NAME
from svc_common.logs import get_logger

_log = get_logger("day0.weights")

SINGLE_NAME = "model.safetensors"


class WeightsError(Exception):
    """The folder's weights cannot be used; the message names files and tensors."""


Progress = Callable[[int, int], None]
"""Told the bytes read so far and the bytes to read in all."""

_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class _Counted:
    """A safetensors slice that tells how much of the checkpoint has been read once it is."""

    def __init__(self, tensor: Any, read: Callable[[int], None]) -> None:
        self._tensor = tensor
        self._read = read

    def __getitem__(self, place: Any) -> Any:
        read = self._tensor[place]
        self._read(read.nbytes)
        return read

    def get_shape(self) -> list[int]:
        """As the file's header has it."""
        return list(self._tensor.get_shape())

    def get_dtype(self) -> str:
        """The format's name of the dtype."""
        return str(self._tensor.get_dtype())

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.get_shape()) * _ITEM_BYTES.get(self.get_dtype(), 1)


@contextmanager
def owned_tensors(folder: Path, progress: Progress = lambda done, expected: None) -> Iterator[dict[str, Any]]:
    """Name to safetensors slice (read when it is indexed) while the context is open.

    Upstream merges all files it finds, and a tensor that stands in two of them comes from the later one. Here the index
    decides. Raises WeightsError before anything is read for files that are missing or damaged, and for tensors that
    their file lacks; files that the index does not name are ignored with a warning.
    """
    by_file = _owners(folder)
    missing = sorted(file for file in by_file if not (folder / file).is_file())
    if missing:
        raise WeightsError(f"{folder}: weight files are missing: {', '.join(missing)}")
    strays = sorted({path.name for path in folder.glob("*.safetensors")} - set(by_file))
    if strays:
        _log.warning("weight files that the index does not name are ignored", extra={"files": strays})
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        done = 0
        counting = Lock()

        def count(read_bytes: int) -> None:
            nonlocal done
            with counting:
                done += read_bytes
                progress(done, expected)

        for file, names in sorted(by_file.items()):
            try:
                opened = stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{folder / file} is no readable weight file: {error}") from error
            present = set(opened.keys())
            absent = sorted((names or present) - present)
            if absent:
                raise WeightsError(f"{file} lacks tensors that the index gives it: {', '.join(absent)}")
            slices |= {name: _Counted(opened.get_slice(name), count) for name in sorted(names or present)}
        expected = sum(tensor.nbytes for tensor in slices.values())
        progress(0, expected)
        yield slices


def _owners(folder: Path) -> dict[str, set[str] | None]:
    """Each weight file with the names it owns; None stands for all that it holds."""
    if not (folder / INDEX_NAME).is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise WeightsError(f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}")
        return {SINGLE_NAME: None}
    by_file: defaultdict[str, set[str] | None] = defaultdict(set)
    try:
        for name, file in json.loads((folder / INDEX_NAME).read_bytes())["weight_map"].items():
            if Path(file).name != file:
                raise WeightsError(f"{INDEX_NAME} gives {name} to {file!r}, which is no file beside it")
            owned = by_file[file]
            assert owned is not None
            owned.add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder / INDEX_NAME} is no weight index: {error!r}") from error
    return dict(by_file)
