"""Finds which file of a checkpoint owns which tensor, by the index where there is one; reads no tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import IndexFault, ShardsMissing, TensorAbsent
from svc_common.logs import get_logger
from svc_common.object_store import ObjectStore, StoredFile
from svc_common.safetensors_header import LENGTH_BYTES, SafetensorsHeader, header_length, parse_header
from svc_common.strict_json import parse_strict_json

_log = get_logger("day0.weight_index")

SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIX = ".safetensors"
# Most headers are shorter, so that one request brings length and header.
_FIRST_READ_BYTES = 64 * 1024
_HEADERS_AT_ONCE = 8
_MAX_INDEX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """Tensor name to the file that owns it. `content` is the index file; without one, `model.safetensors` owns all."""

    owners: Mapping[str, str] | None
    content: bytes | None

    @property
    def files(self) -> list[str]:
        """The weight files, by name."""
        return [SINGLE_NAME] if self.owners is None else sorted(set(self.owners.values()))

    def by_file(self, select: Callable[[str], bool]) -> dict[str, set[str] | None]:
        """The selected names of each file that has any; None where only the file's header knows its names."""
        if self.owners is None:
            return {SINGLE_NAME: None}
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name, file in self.owners.items():
            if select(name):
                found[file].add(name)
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A file's header and its bytes, the 8 of the length included."""

    header: SafetensorsHeader
    content: bytes


Check = Callable[[str, bytes], None]
"""Called with a file's name and the bytes read of it before they are parsed; raises when they are wrong."""


def read_weight_index(store: ObjectStore, listed: Mapping[str, StoredFile], check: Check | None = None) -> WeightIndex:
    """The index of a folder, with a warning for weight files that it does not name.

    Raises IndexFault when it is no index, or when there is neither index nor single file, StoreError, and what `check`
    raises.
    """
    if INDEX_NAME in listed:
        if listed[INDEX_NAME].size_bytes > _MAX_INDEX_BYTES:
            raise IndexFault(
                INDEX_NAME, f"{listed[INDEX_NAME].size_bytes} bytes are above the {_MAX_INDEX_BYTES} of an index"
            )
        content = store.read(listed[INDEX_NAME])
        if check is not None:
            check(INDEX_NAME, content)
        index = WeightIndex(parse_index(content), content)
    elif SINGLE_NAME in listed:
        index = WeightIndex(None, None)
    else:
        raise IndexFault(store.uri, f"has neither {INDEX_NAME} nor {SINGLE_NAME}")
    strays = {name for name in listed if name.endswith(WEIGHT_SUFFIX)} - set(index.files)
    if strays:
        _log.warning("weight files that the index does not name are ignored", extra={"files": sorted(strays)})
    return index


def parse_index(content: bytes) -> dict[str, str]:
    """Tensor name to file name; raises IndexFault for anything but an index of files beside it."""
    try:
        parsed = parse_strict_json(content)
        weight_map = parsed["weight_map"]
        sound = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, KeyError, TypeError) as error:
        raise IndexFault(INDEX_NAME, f"is no weight index: {error!r}") from error
    if not sound or not weight_map:
        raise IndexFault(INDEX_NAME, "its weight_map maps no tensor names to file names")
    for name, file in weight_map.items():
        if "/" in file or "\\" in file or not file.endswith(WEIGHT_SUFFIX):
            raise IndexFault(INDEX_NAME, f"{file!r} is no {WEIGHT_SUFFIX} file beside it", name)
    return weight_map


def require_files(files: Iterable[str], listed: Mapping[str, StoredFile]) -> None:
    """Raises ShardsMissing with all files that are not there."""
    missing = sorted(file for file in set(files) if file not in listed)
    if missing:
        raise ShardsMissing(INDEX_NAME, missing)


def require_tensors(file: str, names: Iterable[str], header: SafetensorsHeader) -> None:
    """Raises TensorAbsent for the first name, in order, that the file lacks."""
    absent = sorted(name for name in names if name not in header.tensors)
    if absent:
        more = f", like {len(absent) - 1} more that the index gives it" if len(absent) > 1 else ""
        raise TensorAbsent(file, f"the index gives it to this file, which lacks it{more}", absent[0])


def read_headers(store: ObjectStore, files: Iterable[StoredFile], check: Check | None = None) -> dict[str, FileHeader]:
    """The headers of some files, several at a time; raises HeaderError, StoreError, and what `check` raises."""
    chosen = list(files)
    with ThreadPoolExecutor(_HEADERS_AT_ONCE, thread_name_prefix="day0-headers") as pool:
        headers = pool.map(lambda file: read_header(store, file, check), chosen)
        return {file.name: header for file, header in zip(chosen, headers, strict=True)}


def read_header(store: ObjectStore, file: StoredFile, check: Check | None = None) -> FileHeader:
    """The header of one file; raises HeaderError, StoreError, and what `check` raises."""
    content = bytes(store.read_range(file, 0, min(_FIRST_READ_BYTES, file.size_bytes)))
    end = LENGTH_BYTES + header_length(content, file.size_bytes, file.name)
    if end > len(content):
        content += store.read_range(file, len(content), end)
    content = content[:end]
    if check is not None:
        check(file.name, content)
    return FileHeader(parse_header(content[LENGTH_BYTES:], file.size_bytes, file.name), content)
