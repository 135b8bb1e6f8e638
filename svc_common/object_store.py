"""Reads files of one folder in an object store or on disk, each pinned to the version that was listed; knows no format.

obstore reads the usual variables (AWS_..., GOOGLE_..., AZURE_...) and asks the metadata services for credentials.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from svc_common.local_files import FileChanged, list_files, read_file, replace_file
from svc_common.logs import get_logger
from svc_common.store_errors import (
    CredentialsExpired,
    ObjectMissing,
    ShortRange,
    UnsupportedUri,
    VersionChanged,
    to_store_error,
)

_log = get_logger("day0.object_store")

_T = TypeVar("_T")
REMOTE_SCHEMES = ("s3", "gs", "az")
# Of a body that are held beside what they are read into. Larger ones were no faster.
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it was listed; every later read of it gets these bytes or VersionChanged."""

    name: str
    size_bytes: int
    etag: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is sent, and the wait before the second time; it doubles each time, with jitter."""

    max_attempts: int = 8
    first_delay_seconds: float = 0.2
    max_delay_seconds: float = 15.0

    def delay_seconds(self, attempt: int) -> float:
        """Between half and all of the wait after this attempt, counted from 1."""
        full = min(self.max_delay_seconds, self.first_delay_seconds * 2.0 ** (attempt - 1))
        return full * random.uniform(0.5, 1.0)


class ObjectStore:
    """The files directly in `uri`: s3://bucket/prefix, gs://, az://, file:///folder or a plain path. Thread safe.

    `config` holds settings of obstore's store for the scheme, and `allow_http`, over those of the environment.
    `credentials` gives more of them and is called again when the store says they have expired; without it the store is
    opened anew, which asks the metadata service or token file again. Throttling, faults of the server, cut bodies,
    short answers and lost connections are retried by `retry`; every failure is a StoreError whose class is the cause.
    """

    def __init__(
        self,
        uri: str,
        *,
        config: Mapping[str, Any] | None = None,
        credentials: Callable[[], Mapping[str, Any]] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._scheme, self._folder = _parse(uri)
        self.uri = uri
        self._config = dict(config or {})
        self._credentials = credentials
        self._retry = retry or RetryPolicy()
        self._lock = threading.Lock()
        self._generation = 0
        self._store = self._open()

    @property
    def folder(self) -> Path | None:
        """The folder where it is on this machine, absolute; None for an object store."""
        return self._folder

    def list(self) -> list[StoredFile]:
        """The files of the folder by name, not those of folders inside it; ObjectMissing when there is none."""
        if self._folder is not None:
            folder = self._folder
            found = self._request("", lambda _: list(list_files(folder)), None)
            files = [StoredFile(name, size_bytes, version, None) for name, size_bytes, version in found]
        else:
            listed = self._request("", self._list_remote, None)
            files = [StoredFile(item["path"], item["size"], item["e_tag"], item["version"]) for item in listed]
        if not files:
            raise ObjectMissing(self.uri, "", "the folder has no files")
        return sorted(files, key=lambda file: file.name)

    def read(self, file: StoredFile, *, cancelled: threading.Event | None = None) -> bytes:
        """All bytes of a small file."""
        return bytes(self.read_range(file, 0, file.size_bytes, cancelled=cancelled))

    def read_range(
        self, file: StoredFile, start: int, stop: int, *, cancelled: threading.Event | None = None
    ) -> memoryview:
        """Bytes [start, stop) of the listed version, exactly; read only. `cancelled` as for `read_into`."""
        content = memoryview(bytearray(stop - start))
        self.read_into(file, start, (content,), cancelled=cancelled)
        return content.toreadonly()

    def read_into(
        self,
        file: StoredFile,
        start: int,
        targets: Sequence[memoryview],
        *,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Fills writable bytes, one target after the other, with those of the listed version from `start` on.

        All of them or an error, after which they hold anything. Little more than the targets is held meanwhile: the
        body comes in chunks. `cancelled` ends the body and the waits between attempts with an error.
        """
        stop = start + sum(map(len, targets))
        assert 0 <= start <= stop <= file.size_bytes, f"{file.name}: [{start}, {stop}) of {file.size_bytes}"
        if start < stop:
            self._request(file.name, lambda store: self._get(store, file, start, stop, targets, cancelled), cancelled)

    def write(self, name: str, content: bytes) -> None:
        """Writes one small file whole or not at all.

        On disk under a temporary name, then renamed. A single PUT is already atomic in an object store, where renaming
        would be a copy and a deletion.
        """
        if self._folder is not None:
            try:
                replace_file(self._folder, name, content)
            except OSError as exc:
                raise to_store_error(exc, self.uri, name) from exc
            return
        import obstore

        self._request(name, lambda store: obstore.put(store, name, content, use_multipart=False), None)

    @staticmethod
    def _list_remote(store: Any) -> Any:
        import obstore

        return obstore.list_with_delimiter(store)["objects"]

    def _get(
        self,
        store: Any,
        file: StoredFile,
        start: int,
        stop: int,
        targets: Sequence[memoryview],
        cancelled: threading.Event | None,
    ) -> None:
        if self._folder is not None:
            try:
                read_file(self._folder / file.name, file.etag, file.size_bytes, start, targets)
            except FileChanged as error:
                raise VersionChanged(self.uri, file.name, str(error)) from None
            return
        import obstore

        options: dict[str, Any] = {"range": (start, stop)}
        # A weak ETag never matches in If-Match; the comparison below holds for it too.
        if file.etag is not None and not file.etag.startswith("W/"):
            options["if_match"] = self._quoted(file.etag)
        if file.version is not None:
            options["version"] = file.version
        result = obstore.get(store, file.name, options=options)  # type: ignore[arg-type]
        meta = result.meta
        if meta["size"] != file.size_bytes:
            raise VersionChanged(self.uri, file.name, f"listed with {file.size_bytes} bytes, now {meta['size']}")
        if file.etag is not None and meta["e_tag"] is not None and meta["e_tag"].strip('"') != file.etag.strip('"'):
            raise VersionChanged(self.uri, file.name, f"listed with ETag {file.etag}, now {meta['e_tag']}")
        chunks = (memoryview(chunk) for chunk in result.stream(min_chunk_size=_CHUNK_BYTES))
        received = _fill(targets, chunks if cancelled is None else takewhile(lambda _: not cancelled.is_set(), chunks))
        if received != stop - start:
            raise ShortRange(self.uri, file.name, f"{received} bytes for the range [{start}, {stop})")

    def _quoted(self, etag: str) -> str:
        # Azure lists ETags bare and compares them quoted.
        return f'"{etag}"' if self._scheme == "az" and not etag.startswith('"') else etag

    def _request(self, name: str, send: Callable[[Any], _T], cancelled: threading.Event | None) -> _T:
        attempt, refreshed = 1, False
        while True:
            with self._lock:
                store, generation = self._store, self._generation
            try:
                return send(store)
            except Exception as exc:
                error = to_store_error(exc, self.uri, name)
            if isinstance(error, CredentialsExpired) and not refreshed:
                refreshed = True
                self._refresh(generation)
                continue
            error.attempts = attempt
            stopped = cancelled is not None and cancelled.is_set()
            if not error.retried or attempt >= self._retry.max_attempts or stopped:
                # The exception behind it quotes the store's whole answer, which can hold a session token.
                raise error from None
            delay_seconds = self._retry.delay_seconds(attempt)
            _log.warning(
                "a request to the store is sent again",
                extra={
                    "file": name,
                    "cause": error.cause,
                    "attempt": attempt,
                    "delay_seconds": round(delay_seconds, 3),
                },
            )
            (cancelled or threading.Event()).wait(delay_seconds)
            attempt += 1

    def _refresh(self, generation: int) -> None:
        with self._lock:
            # Another thread may have done it for the same expiry.
            if generation == self._generation:
                _log.warning("the store says that the credentials have expired; they are refreshed")
                self._store = self._open()
                self._generation += 1

    def _open(self) -> Any:
        if self._folder is not None:
            return None
        from obstore.store import from_url

        # Its overloads go by scheme, which is not known before.
        open_url: Callable[..., Any] = from_url
        try:
            config = {**self._config, **(self._credentials() if self._credentials else {})}
            # Options given here would hide AWS_ALLOW_HTTP and its like. Without them obstore waits 5 s for a connection
            # and 30 s for a whole answer, which also bounds how long a cancelled read goes on.
            client = {"allow_http": config.pop("allow_http")} if "allow_http" in config else None
            return open_url(
                self.uri,
                config=config,
                client_options=client,
                # Retries are ours: those of obstore would hide the cause and keep expired credentials.
                retry_config={"max_retries": 0},
            )
        except Exception as exc:
            raise to_store_error(exc, self.uri, "") from None


def _fill(targets: Sequence[memoryview], chunks: Iterable[memoryview]) -> int:
    """Copies the chunks over the targets, and gives the bytes of all chunks; what is too much goes nowhere."""
    received = 0
    waiting = iter(targets)
    target = next(waiting)
    for chunk in chunks:
        received += len(chunk)
        taken = 0
        while taken < len(chunk):
            while not target:
                if (following := next(waiting, None)) is None:
                    return received
                target = following
            count = min(len(chunk) - taken, len(target))
            target[:count] = chunk[taken : taken + count]
            taken, target = taken + count, target[count:]
    return received


def _parse(uri: str) -> tuple[str, Path | None]:
    """The scheme, and the folder where it is on disk; raises UnsupportedUri or ObjectMissing."""
    parts = urlsplit(uri)
    if "://" not in uri:
        folder = Path(uri)
    elif parts.scheme == "file" and parts.netloc in ("", "localhost"):
        folder = Path(unquote(parts.path))
    elif parts.scheme in REMOTE_SCHEMES and parts.netloc:
        if parts.query or parts.fragment or parts.username is not None:
            raise UnsupportedUri(
                uri.split("://", maxsplit=1)[0] + "://...", "", "only a bucket and a prefix, nothing else, may follow"
            )
        return parts.scheme, None
    else:
        raise UnsupportedUri(uri, "", f"a path, file:///folder, or {', '.join(f'{s}://' for s in REMOTE_SCHEMES)}")
    if not folder.is_dir():
        raise ObjectMissing(uri, "", "no such folder")
    return "file", folder.absolute()
