"""A folder's files are read into many buffers at once, and only as they were listed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from svc_common.local_files import FileChanged, list_files, read_file

CONTENT = bytes(range(256)) * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    return tmp_path / "a.bin"


def listed(path: Path) -> tuple[str, int]:
    ((name, size_bytes, version),) = list_files(path.parent)
    assert (name, size_bytes) == (path.name, path.stat().st_size)
    return version, size_bytes


@pytest.mark.parametrize("sizes", [[4096 - 5], [1, 0, 2, 0], [1] * 3000, [0], []])
def test_targets_are_filled_one_after_the_other(path: Path, sizes: list[int]) -> None:
    """More of them than the system takes at once, too."""
    targets = [memoryview(bytearray(size)) for size in sizes]
    read_file(path, *listed(path), 5, targets)
    assert b"".join(targets) == CONTENT[5 : 5 + sum(sizes)]


def test_reads_that_come_short_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, targets, place: whole(file, [targets[0][:3]], place))
    targets = [memoryview(bytearray(size)) for size in (7, 1, 3, 20)]
    read_file(path, *listed(path), 9, targets)
    assert b"".join(targets) == CONTENT[9:40]


def test_the_same_size_at_another_time_is_another_file(path: Path) -> None:
    version = listed(path)
    target = memoryview(bytearray(4))
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(FileChanged, match="listed as"):
        read_file(path, *version, 0, [target])
    version = listed(path)
    other = path.with_name("b.bin")
    other.write_bytes(CONTENT)
    os.utime(other, ns=(1, 1))
    other.replace(path)
    with pytest.raises(FileChanged, match="listed as"):
        read_file(path, *version, 0, [target])
    read_file(path, *listed(path), 0, [target])
    assert target == CONTENT[:4]


def test_another_size_is_named(path: Path) -> None:
    version = listed(path)
    path.write_bytes(CONTENT[:9])
    with pytest.raises(FileChanged, match="listed with 4096 bytes, now 9"):
        read_file(path, *version, 0, [memoryview(bytearray(4))])
    with pytest.raises(FileChanged, match="ends at byte 9 of 9"):
        read_file(path, *listed(path), 5, [memoryview(bytearray(5))])
