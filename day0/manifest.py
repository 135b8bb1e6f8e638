"""`day0 manifest` and `day0 verify`: digests of a checkpoint made and checked, with a bar; knows nothing of how."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from day0.terminal import printable
from svc_common.digests import Progress as Told
from svc_common.digests import make_manifest, verify_checkpoint
from svc_common.manifest import MANIFEST_NAME, write_manifest
from svc_common.object_store import ObjectStore
from svc_common.piece_reader import ReadLimits

MEBIBYTE = 1024 * 1024


def make(uri: str, *, memory_mib: int, as_json: bool) -> None:
    """Reads the checkpoint, writes the manifest beside it, prints what it covers; StoreError, CheckpointError."""
    store = ObjectStore(uri)
    began = time.monotonic()
    with _bar("hashing") as told:
        manifest = make_manifest(store, limits=ReadLimits(memory_mib * MEBIBYTE), progress=told)
    write_manifest(store, manifest)
    document = {
        "uri": uri,
        "manifest": MANIFEST_NAME,
        "sha256": manifest.sha256,
        "files": len(manifest.files),
        "tensors": sum(len(digest.tensors) for digest in manifest.files.values()),
        **_rate(sum(digest.size_bytes for digest in manifest.files.values()), began),
    }
    if as_json:
        print(json.dumps(document))
        return
    print(f"{MANIFEST_NAME}: {document['files']} files, {document['tensors']} tensors, {_rate_line(document)}")
    print(f"sha256 {document['sha256']}")


def verify(uri: str, *, memory_mib: int, as_json: bool) -> bool:
    """Whether the checkpoint is that of its manifest; prints every difference. Raises StoreError, CheckpointError."""
    store = ObjectStore(uri)
    began = time.monotonic()
    with _bar("verifying") as told:
        found = verify_checkpoint(store, limits=ReadLimits(memory_mib * MEBIBYTE), progress=told)
    document: dict[str, Any] = {
        "uri": uri,
        "ok": not found.problems,
        "files": found.files,
        **_rate(found.size_bytes, began),
        "problems": [
            {"file": problem.file, "tensor": problem.tensor, "problem": problem.problem} for problem in found.problems
        ],
    }
    if as_json:
        print(json.dumps(document))
        return not found.problems
    for problem in found.problems:
        tensor = "" if problem.tensor is None else f"tensor {problem.tensor!r}: "
        # Names come from the checkpoint, which may be anybody's.
        print(printable(f"{problem.file}: {tensor}{problem.problem}"))
    verdict = f"{len(found.problems)} problems" if found.problems else "every byte is right"
    print(f"{verdict}: {found.files} files read, {_rate_line(document)}")
    return not found.problems


@contextmanager
def _bar(what: str) -> Iterator[Told]:
    """A bar with bytes, rate and expected end on standard error, where that is a terminal."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, expected: progress.update(task, completed=done, total=expected)


def _rate(size_bytes: int, began: float) -> dict[str, Any]:
    seconds = time.monotonic() - began
    return {"bytes": size_bytes, "seconds": round(seconds, 3), "bytes_per_second": round(size_bytes / seconds)}


def _rate_line(document: dict[str, Any]) -> str:
    rate = decimal(document["bytes_per_second"])
    return f"{decimal(document['bytes'])} in {document['seconds']:.1f} s ({rate}/s)"
