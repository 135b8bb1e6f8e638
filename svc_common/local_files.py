"""Lists, reads and replaces the files of a folder on this machine the way an object store would; knows no format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

# IOV_MAX of Linux and macOS.
_MOST_TARGETS = 1024


class FileChanged(Exception):
    """The file is not the one that was listed; the message says in what."""


def list_files(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Name, size in bytes and version of each file directly in `folder`, links to files included. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():
                status = entry.stat()
                yield entry.name, status.st_size, _version(status)


def read_file(path: Path, version: str | None, size_bytes: int, start: int, targets: Sequence[memoryview]) -> None:
    """Fills the targets, one after the other, from byte `start` on; raises FileChanged and OSError.

    The file that was opened is the one compared, so a file renamed over it is either wholly read or refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        if status.st_size != size_bytes:
            raise FileChanged(f"listed with {size_bytes} bytes, now {status.st_size}")
        if version is not None and _version(status) != version:
            raise FileChanged(f"listed as {version}, now {_version(status)}")
        position = start
        for begin in range(0, len(targets), _MOST_TARGETS):
            left = [target for target in targets[begin : begin + _MOST_TARGETS] if target]
            while left:
                count = os.preadv(descriptor, left, position)
                if not count:
                    raise FileChanged(f"ends at byte {position} of {size_bytes}")
                position += count
                left = _after(left, count)
    finally:
        os.close(descriptor)


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Writes a small file under a temporary name and renames it: whole or not at all. Raises OSError."""
    partial = folder / f".{name}.{os.getpid()}.partial"
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / name)
    finally:
        partial.unlink(missing_ok=True)


def _after(targets: list[memoryview], count: int) -> list[memoryview]:
    """What is still to be filled once the first `count` bytes are."""
    for number, target in enumerate(targets):
        if count < len(target):
            return [target[count:], *targets[number + 1 :]]
        count -= len(target)
    return []


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
