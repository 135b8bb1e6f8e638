"""Computes the digests of a whole checkpoint, and compares one with its manifest, by streaming in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import CheckpointError, DigestMismatch, IndexFault, ManifestFault
from svc_common.manifest import (
    CONFIG_NAME,
    MANIFEST_NAME,
    FileDigest,
    Manifest,
    TensorDigest,
    read_manifest,
)
from svc_common.object_store import ObjectStore, StoredFile
from svc_common.piece_reader import Piece, PieceReader, ReadLimits, cut
from svc_common.safetensors_header import TensorSpan
from svc_common.weight_index import (
    FileHeader,
    WeightIndex,
    read_header,
    read_headers,
    read_weight_index,
    require_files,
    require_tensors,
)

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes expected, after each piece."""

# What a service reads beside weights: configuration, tokenizer, templates, remote code.
_COVERED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


@dataclass(frozen=True, slots=True)
class Problem:
    """One way in which a checkpoint differs from its manifest."""

    file: str
    tensor: str | None
    problem: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify_checkpoint` read, and the problems it found: none means that every covered byte is right."""

    files: int
    size_bytes: int
    problems: tuple[Problem, ...]


def make_manifest(
    store: ObjectStore, *, limits: ReadLimits | None = None, progress: Progress | None = None
) -> Manifest:
    """Reads the checkpoint once. The same bytes give the same manifest, wherever they lie.

    A checkpoint that could not be served has none: raises CheckpointError for missing shards, tensors the index gives
    to a file that lacks them, headers that are not valid; and StoreError.
    """
    listed = {file.name: file for file in store.list()}
    if CONFIG_NAME not in listed:
        raise IndexFault(store.uri, f"has no {CONFIG_NAME}")
    index = read_weight_index(store, listed)
    require_files(index.files, listed)
    headers = read_headers(store, (listed[name] for name in index.files))
    _check_owners(index, headers)
    names = sorted([*_plain_files(listed), *index.files])
    hashing = {name: _FileHash(headers.get(name)) for name in names}
    _hash_files([listed[name] for name in names], hashing, store, limits or ReadLimits(), progress)
    files = {name: hashing[name].digest(listed[name].size_bytes) for name in names}
    index_sha256 = None if index.content is None else files[INDEX_NAME].sha256
    return Manifest(files[CONFIG_NAME].sha256, index_sha256, files)


def verify_checkpoint(
    store: ObjectStore, *, limits: ReadLimits | None = None, progress: Progress | None = None
) -> Verification:
    """Reads every file that the manifest covers and says all that is wrong; raises ManifestFault and StoreError."""
    limits = limits or ReadLimits()
    listed = {file.name: file for file in store.list()}
    manifest = read_manifest(store, listed)
    problems: list[Problem] = []
    whole: list[StoredFile] = []
    hashing: dict[str, _FileHash] = {}
    names = sorted(manifest.files)
    with ThreadPoolExecutor(limits.readers, thread_name_prefix="day0-verify") as pool:
        checked = pool.map(lambda name: _checked_header(store, listed.get(name), name, manifest), names)
        for name, found in zip(names, checked, strict=True):
            if isinstance(found, CheckpointError):
                problems.append(Problem(found.file, found.tensor, found.problem))
            else:
                whole.append(listed[name])
                hashing[name] = _FileHash(found)
    for name in sorted(set(_plain_files(listed)) - set(manifest.files)):
        problems.append(Problem(name, None, "the manifest does not cover this file"))
    _hash_files(whole, hashing, store, limits, progress)
    for file in whole:
        problems += _differences(file.name, manifest.file(file.name), hashing[file.name].digest(file.size_bytes))
    return Verification(len(whole), sum(file.size_bytes for file in whole), tuple(problems))


def _plain_files(listed: Mapping[str, StoredFile]) -> Iterator[str]:
    for name in listed:
        if name.endswith(_COVERED_SUFFIXES) and not name.startswith(".") and name != MANIFEST_NAME:
            yield name


def _check_owners(index: WeightIndex, headers: Mapping[str, FileHeader]) -> None:
    for file, names in index.by_file(lambda _: True).items():
        if names is not None:
            require_tensors(file, names, headers[file].header)


def _checked_header(
    store: ObjectStore, file: StoredFile | None, name: str, manifest: Manifest
) -> FileHeader | CheckpointError | None:
    """The header of a weight file, None for another file, or what is wrong before its bytes are read."""
    try:
        if file is None:
            raise DigestMismatch(name, "the file is missing")
        manifest.check_size(file)
        digest = manifest.file(name)
        if digest.header_sha256 is None:
            return None
        header = read_header(store, file, manifest.check_header)
        if header.header.tensors.keys() != digest.tensors.keys():
            raise ManifestFault(MANIFEST_NAME, f"its tensors of {name} are not those of the file")
    except CheckpointError as error:
        return error
    return header


def _differences(name: str, expected: FileDigest, actual: FileDigest) -> list[Problem]:
    if expected.sha256 == actual.sha256:
        return []
    wrong = [
        Problem(name, tensor, "wrong bytes: its sha256 is not that of the manifest")
        for tensor, digest in expected.tensors.items()
        if digest != actual.tensors[tensor]
    ]
    return wrong or [Problem(name, None, "wrong bytes: its sha256 is not that of the manifest")]


class _FileHash:
    """Digests of one file and, given its header, of its tensors; bytes come in order."""

    def __init__(self, header: FileHeader | None) -> None:
        self._header = header
        self._file = hashlib.sha256()
        self._spans = list(header.header.tensors.values()) if header else []
        self._next = 0
        self._tensor = hashlib.sha256()
        self._done: dict[str, TensorDigest] = {}
        self._position = 0

    def update(self, content: memoryview, beside: ThreadPoolExecutor) -> None:
        """The next bytes; those of the file are hashed in another thread beside those of its tensors."""
        whole = beside.submit(self._file.update, content)
        self._update_tensors(content)
        whole.result()

    def _update_tensors(self, content: memoryview) -> None:
        start, self._position = self._position, self._position + len(content)
        while self._next < len(self._spans):
            span = self._spans[self._next]
            if span.start >= self._position and span.size_bytes:
                return
            self._tensor.update(content[max(0, span.start - start) : max(0, span.stop - start)])
            if span.stop > self._position:
                return
            self._finish(span)

    def digest(self, size_bytes: int) -> FileDigest:
        """Once all bytes were seen."""
        assert self._position == size_bytes and self._next == len(self._spans)
        header = None if self._header is None else hashlib.sha256(self._header.content).hexdigest()
        return FileDigest(size_bytes, self._file.hexdigest(), header, self._done)

    def _finish(self, span: TensorSpan) -> None:
        self._done[span.name] = TensorDigest(span.dtype, span.shape, span.size_bytes, self._tensor.hexdigest())
        self._next += 1
        self._tensor = hashlib.sha256()


def _hash_files(
    files: list[StoredFile],
    hashing: Mapping[str, _FileHash],
    store: ObjectStore,
    limits: ReadLimits,
    progress: Progress | None,
) -> None:
    expected = sum(file.size_bytes for file in files)
    done = 0

    def pieces() -> Iterator[Piece]:
        for file in files:
            yield from cut(file, 0, file.size_bytes, limits.piece_bytes)

    with ThreadPoolExecutor(1, thread_name_prefix="day0-hash") as beside:
        for piece, content in PieceReader(store, limits).read(pieces()):
            hashing[piece.file.name].update(content, beside)
            done += piece.size_bytes
            # The loop variable would keep these bytes while the next piece is awaited.
            del content
            if progress is not None:
                progress(done, expected)
