"""Streams chosen tensors of a checkpoint one by one, checked against its manifest; knows no tensor library or model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import DigestMismatch, ManifestFault, TensorAbsent
from svc_common.manifest import MANIFEST_NAME, Manifest, TensorDigest, check_digest
from svc_common.object_store import ObjectStore, StoredFile
from svc_common.piece_reader import ReadLimits
from svc_common.safetensors_header import TensorSpan
from svc_common.tensor_reader import Allocate, Buffer, ChosenTensors, TensorReader
from svc_common.weight_index import read_headers, read_weight_index, require_files, require_tensors

Progress = Callable[[int, int], None]
"""Told the bytes of tensors read and those expected, after each piece."""


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor's bytes, little endian, row major, in a buffer that nobody else has; `dtype` as the format names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    buffer: Buffer


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

    def tensors(self, progress: Progress | None = None, allocate: Allocate = bytearray) -> Iterator[StreamedTensor]:
        """Each chosen tensor once, by file and then by place in it, only after its digest was found right.

        Bytes go straight into the buffers of `allocate`, those of later tensors meanwhile: see TensorReader for the
        budget. Where there is no manifest nothing is hashed. Raises DigestMismatch and StoreError. Closing the iterator
        ends all requests.
        """
        done, expected = 0, self.expected_bytes

        def on_bytes(more: int) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress(done, expected)

        reader = TensorReader(self._store, self._limits, allocate, on_bytes)
        digests = {chosen.file.name: chosen.digests for chosen in self._chosen}
        reading = reader.read(ChosenTensors(one.file, one.spans, one.digests is not None) for one in self._chosen)
        with closing(reading):
            for tensor in reading:
                span, file = tensor.span, tensor.file.name
                if (known := digests[file]) is not None:
                    check_digest(file, "tensor", known[span.name].sha256, tensor.sha256(), span.name)
                yield StreamedTensor(span.name, span.dtype, span.shape, file, tensor.buffer)
                # It is the caller's now; the loop's variable would keep it until the next one is complete.
                del tensor


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
