"""Streams chosen tensors of a checkpoint one by one, checked against its manifest; knows no tensor library or model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import DigestMismatch, ManifestFault, TensorAbsent
from svc_common.manifest import MANIFEST_NAME, Manifest, TensorDigest, check_digest
from svc_common.object_store import ObjectStore, StoredFile
from svc_common.piece_reader import Piece, PieceReader, ReadLimits, cut
from svc_common.safetensors_header import TensorSpan
from svc_common.weight_index import read_headers, read_weight_index, require_files, require_tensors

Progress = Callable[[int, int], None]
"""Told the bytes of tensors read and those expected, after each piece."""

# Unread bytes between two chosen tensors that are cheaper to read than to ask for separately.
_BRIDGED_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor's bytes, little endian, row major, in a buffer that nobody else has; `dtype` as the format names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    buffer: bytearray


@dataclass(frozen=True, slots=True)
class _ChosenFile:
    file: StoredFile
    spans: tuple[TensorSpan, ...]
    digests: Mapping[str, TensorDigest] | None


class WeightStream:
    """The chosen tensors of a checkpoint; opening one reads the index and the headers, and no tensor.

    Make it with `open_weights`.
    """

    def __init__(self, store: ObjectStore, chosen: tuple[_ChosenFile, ...], limits: ReadLimits) -> None:
        self._store = store
        self._chosen = chosen
        self._limits = limits

    @property
    def files(self) -> tuple[str, ...]:
        """The files that will be read."""
        return tuple(chosen.file.name for chosen in self._chosen)

    @property
    def spans(self) -> dict[str, TensorSpan]:
        """What is known of each chosen tensor, in the order in which they come."""
        return {span.name: span for chosen in self._chosen for span in chosen.spans}

    @property
    def expected_bytes(self) -> int:
        """Bytes of all chosen tensors."""
        return sum(span.size_bytes for chosen in self._chosen for span in chosen.spans)

    def tensors(self, progress: Progress | None = None) -> Iterator[StreamedTensor]:
        """Each chosen tensor once, by file and then by place in it, only after its digest was found right.

        The ranges of later ones are in flight meanwhile. They and the tensor being put together stay within the
        budget; beside a tensor larger than half of it they take the other half. Raises DigestMismatch and StoreError.
        Closing the iterator ends all requests.
        """
        reader = PieceReader(self._store, self._limits)
        pieces = reader.read(piece for chosen in self._chosen for piece in self._pieces(chosen))
        done, expected = 0, self.expected_bytes
        try:
            for chosen in self._chosen:
                piece: Piece | None = None
                content = memoryview(b"")
                for span in chosen.spans:
                    reader.held_bytes = min(span.size_bytes, self._limits.budget_bytes // 2)
                    buffer = bytearray(span.size_bytes)
                    digest = hashlib.sha256()
                    position = span.start
                    while position < span.stop:
                        while piece is None or position >= piece.stop:
                            content = memoryview(b"")
                            piece, content = next(pieces)
                        assert piece.file is chosen.file and piece.start <= position < piece.stop
                        part = content[position - piece.start : span.stop - piece.start]
                        buffer[position - span.start : position - span.start + len(part)] = part
                        digest.update(part)
                        position += len(part)
                        done += len(part)
                        del part
                        if progress is not None:
                            progress(done, expected)
                    _check_tensor(chosen, span, digest.hexdigest())
                    yield StreamedTensor(span.name, span.dtype, span.shape, chosen.file.name, buffer)
                    # It is the caller's now, and no longer ours to count.
                    del buffer
                    reader.held_bytes = 0
        finally:
            pieces.close()  # type: ignore[attr-defined]

    def _pieces(self, chosen: _ChosenFile) -> Iterator[Piece]:
        for start, stop in _runs(chosen.spans, min(_BRIDGED_BYTES, self._limits.piece_bytes)):
            yield from cut(chosen.file, start, stop, self._limits.piece_bytes)


def open_weights(
    store: ObjectStore,
    manifest: Manifest | None,
    *,
    select: Callable[[str], bool] = lambda _: True,
    limits: ReadLimits | None = None,
) -> WeightStream:
    """Finds the tensors whose name `select` takes. Without a manifest no byte is checked beyond format and length.

    In this order: every missing file is listed, the index, the files' sizes and their headers are checked against the
    manifest, and each name must be in the file that the index gives it. Raises CheckpointError and StoreError.
    """
    listed = {file.name: file for file in store.list()}
    index = read_weight_index(store, listed, manifest.check_content if manifest else None)
    if index.content is None and manifest is not None and manifest.index_sha256 is not None:
        raise DigestMismatch(INDEX_NAME, "the file is missing, and the manifest covers it")
    by_file = index.by_file(select)
    require_files(by_file, listed)
    if manifest is not None:
        for name in by_file:
            manifest.check_size(listed[name])
    headers = read_headers(store, (listed[name] for name in by_file), manifest.check_header if manifest else None)
    chosen = []
    for name, owned in by_file.items():
        header = headers[name].header
        digests = manifest.file(name).tensors if manifest else None
        if digests is not None and digests.keys() != header.tensors.keys():
            raise ManifestFault(MANIFEST_NAME, f"its tensors of {name} are not those of the file")
        names = {tensor for tensor in header.tensors if select(tensor)} if owned is None else owned
        require_tensors(name, names, header)
        spans = tuple(span for span in header.tensors.values() if span.name in names)
        if spans:
            chosen.append(_ChosenFile(listed[name], spans, digests))
    if not chosen:
        raise TensorAbsent(store.uri, "has none of the tensors that are asked for")
    return WeightStream(store, tuple(chosen), limits or ReadLimits())


def _check_tensor(chosen: _ChosenFile, span: TensorSpan, actual: str) -> None:
    if chosen.digests is not None:
        check_digest(chosen.file.name, "tensor", chosen.digests[span.name].sha256, actual, span.name)


def _runs(spans: tuple[TensorSpan, ...], bridged_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover all spans, which come by place; gaps of at most `bridged_bytes` are read over."""
    start = stop = -1
    for span in spans:
        if not span.size_bytes:
            continue
        if start >= 0 and span.start - stop <= bridged_bytes:
            stop = span.stop
            continue
        if start >= 0:
            yield start, stop
        start, stop = span.start, span.stop
    if start >= 0:
        yield start, stop
