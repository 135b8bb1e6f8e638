"""A checkpoint wherever it is: its small files in a local folder, its weights as a checked stream; knows no model."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import CheckpointError
from svc_common.logs import get_logger
from svc_common.manifest import CONFIG_NAME, MANIFEST_NAME, Manifest, read_manifest
from svc_common.object_store import ObjectStore, StoredFile
from svc_common.piece_reader import ReadLimits
from svc_common.weight_index import WEIGHT_SUFFIX
from svc_common.weight_stream import WeightStream, open_weights

_log = get_logger("day0.checkpoint")

# Everything but weights: configuration, tokenizer, template, processor files. The largest known tokenizers are 40 MB.
MAX_SMALL_FILES_BYTES = 512 * 1024 * 1024


class CheckpointSource:
    """Opening one lists the files, reads the manifest where there is one, and fetches the small files.

    `folder` holds them: the folder itself where the checkpoint is on this machine, else a temporary one that `close`
    removes. Small files are checked against the manifest too. `on_listed` is called between listing and reading.
    Raises CheckpointError and StoreError.
    """

    def __init__(
        self,
        uri: str,
        *,
        require_manifest: bool = False,
        budget_bytes: int | None = None,
        on_listed: Callable[[], object] = lambda: None,
    ) -> None:
        self.uri = uri
        self._limits = ReadLimits() if budget_bytes is None else ReadLimits(budget_bytes)
        self._store = ObjectStore(uri)
        self._listed = {file.name: file for file in self._store.list()}
        if CONFIG_NAME not in self._listed:
            raise CheckpointError(CONFIG_NAME, f"is not in {uri}")
        on_listed()
        self.manifest: Manifest | None = None
        if require_manifest or MANIFEST_NAME in self._listed:
            self.manifest = read_manifest(self._store, self._listed)
        else:
            _log.warning("the checkpoint has no manifest: its bytes are not verified", extra={"uri": uri})
        local = self._store.folder
        # Removed at the end of the process too, should it end before `close`.
        self._temporary = None if local is not None else tempfile.TemporaryDirectory(prefix="day0-checkpoint-")
        fetched = None if self._temporary is None else Path(self._temporary.name)
        try:
            small = self._fetch(keep=fetched)
        except BaseException:
            self.close()
            raise
        folder = local or fetched
        assert folder is not None
        self.folder: Path = folder
        """Where the small files are."""
        self.digest = self._digest(small)

    @property
    def name(self) -> str:
        """The last part of where it is."""
        return self.folder.resolve().name if self._temporary is None else self.uri.rstrip("/").rsplit("/", 1)[-1]

    def weights(self, select: Callable[[str], bool] = lambda _: True) -> WeightStream:
        """The tensors whose name `select` takes; see `open_weights`."""
        return open_weights(self._store, self.manifest, select=select, limits=self._limits)

    def close(self) -> None:
        """Removes what was fetched."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _fetch(self, keep: Path | None) -> dict[str, bytes]:
        """Reads the small files, to `keep` where there is one; gives those that name the checkpoint."""
        wanted = [file for file in self._listed.values() if self._is_small(file)]
        total = sum(file.size_bytes for file in wanted)
        if keep is not None and total > MAX_SMALL_FILES_BYTES:
            raise CheckpointError(self.uri, f"files beside the weights are {total} bytes, over {MAX_SMALL_FILES_BYTES}")
        naming: dict[str, bytes] = {}
        for file in wanted:
            covered = self.manifest is not None and file.name in self.manifest.files
            names_checkpoint = file.name in (CONFIG_NAME, INDEX_NAME)
            if keep is None and not covered and not names_checkpoint:
                continue
            content = self._store.read(file)
            if self.manifest is not None and covered:
                self.manifest.check_content(file.name, content)
            if keep is not None:
                if Path(file.name).name != file.name:
                    raise CheckpointError(self.uri, f"the name {file.name!r} is no file of one folder")
                (keep / file.name).write_bytes(content)
            if names_checkpoint:
                naming[file.name] = content
        return naming

    @staticmethod
    def _is_small(file: StoredFile) -> bool:
        return not file.name.endswith(WEIGHT_SUFFIX) and file.name != MANIFEST_NAME

    def _digest(self, small: dict[str, bytes]) -> str:
        """Hexadecimal sha256 over the configuration, the index, and the weight files' names and sizes."""
        digest = hashlib.sha256(small[CONFIG_NAME])
        digest.update(small.get(INDEX_NAME, b""))
        for file in self._listed.values():
            if file.name.endswith(WEIGHT_SUFFIX):
                digest.update(f"{file.name}:{file.size_bytes}".encode())
        return digest.hexdigest()
