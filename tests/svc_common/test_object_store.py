"""What the reader makes of every trouble an object store can be: the right bytes, or the cause by name."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from svc_common.object_store import ObjectStore, RetryPolicy, StoredFile
from svc_common.store_errors import (
    AccessDenied,
    BodyCut,
    CredentialsExpired,
    ObjectMissing,
    PlainHttpRefused,
    RangeIgnored,
    ServerFault,
    ShortRange,
    StoreError,
    Throttled,
    TlsFault,
    Unreachable,
    UnsupportedUri,
    VersionChanged,
)
from tests.s3_double import BUCKET, PREFIX, S3Double, config_of

URI = f"s3://{BUCKET}/{PREFIX}"
CONTENT = bytes(range(256)) * 4
QUICK = RetryPolicy(max_attempts=3, first_delay_seconds=0.001, max_delay_seconds=0.002)


@pytest.fixture
def double() -> Iterator[S3Double]:
    double = S3Double()
    double.put("a.bin", CONTENT)
    yield double
    double.stop()


@pytest.fixture
def store(double: S3Double) -> ObjectStore:
    return ObjectStore(URI, config=double.config(), retry=QUICK)


def only(store: ObjectStore) -> StoredFile:
    (file,) = store.list()
    return file


def test_ranges_are_read_and_pinned(double: S3Double, store: ObjectStore) -> None:
    file = only(store)
    assert (file.name, file.size_bytes, file.etag) == ("a.bin", 1024, '"a.bin-1"')
    assert store.read_range(file, 10, 110) == CONTENT[10:110]
    assert store.read_range(file, 7, 7) == b""
    assert double.ranges("a.bin") == ["bytes=10-109"] and double.if_matches == ['"a.bin-1"']
    assert store.read(file) == CONTENT


def test_a_body_of_many_chunks_is_spread_over_its_targets(double: S3Double, store: ObjectStore) -> None:
    content = random.Random(5).randbytes(3_000_000)
    double.put("a.bin", content)
    file = only(store)
    targets = [memoryview(bytearray(size)) for size in (1, 0, 700_000, 3, 1_500_000, 0)]
    double.script.extend(["cut", "ok"])
    store.read_into(file, 11, targets)
    assert b"".join(targets) == content[11 : 11 + 2_200_004]
    assert double.ranges("a.bin") == ["bytes=11-2200014"] * 2


def test_cancelling_ends_a_body(double: S3Double, store: ObjectStore) -> None:
    double.put("a.bin", bytes(3_000_000))
    file = only(store)
    cancelled = threading.Event()
    double.at_request = lambda _: cancelled.set()
    with pytest.raises(ShortRange, match=r": 0 bytes for the range"):
        store.read_into(file, 0, [memoryview(bytearray(3_000_000))], cancelled=cancelled)
    assert len(double.ranges("a.bin")) == 1


@pytest.mark.parametrize("fault", ["slow", "fault", "cut", "short", "short_range", "reset"])
def test_passing_trouble_is_retried(
    double: S3Double, store: ObjectStore, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = only(store)
    double.script.extend([fault, fault])
    with caplog.at_level(logging.WARNING):
        assert store.read_range(file, 0, 100) == CONTENT[:100]
    assert len(double.ranges("a.bin")) == 3
    assert [record.attempt for record in caplog.records] == [1, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("slow", Throttled, "is throttling: 503 SlowDown (tried 3 times)"),
        ("fault", ServerFault, "internal fault: 500 InternalError (tried 3 times)"),
        ("cut", BodyCut, "body was cut off"),
        ("short", ShortRange, "99 bytes for the range [0, 100) (tried 3 times)"),
        ("short_range", ShortRange, "wrong length or range"),
        ("reset", Unreachable, "cannot be reached"),
    ],
)
def test_lasting_trouble_is_named(
    double: S3Double, store: ObjectStore, fault: str, error: type[StoreError], says: str
) -> None:
    file = only(store)
    double.script.extend([fault] * 5)
    with pytest.raises(error) as caught:
        store.read_range(file, 0, 100)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"a.bin in {URI}: ") and says in str(caught.value)
    assert len(double.ranges("a.bin")) == 3


@pytest.mark.parametrize(
    ("fault", "error"), [("whole", RangeIgnored), ("denied", AccessDenied)], ids=["200 to a range", "denied"]
)
def test_hopeless_trouble_is_not_retried(
    double: S3Double, store: ObjectStore, fault: str, error: type[StoreError]
) -> None:
    file = only(store)
    double.script.append(fault)
    with pytest.raises(error) as caught:
        store.read_range(file, 0, 100)
    assert type(caught.value) is error and "tried" not in str(caught.value)
    assert len(double.ranges("a.bin")) == 1


@pytest.mark.parametrize("honours_if_match", [True, False])
def test_replaced_between_ranges(double: S3Double, store: ObjectStore, honours_if_match: bool) -> None:
    double.honours_if_match = honours_if_match
    file = only(store)
    double.script.append("replace")
    assert store.read_range(file, 0, 10) == CONTENT[:10]
    with pytest.raises(VersionChanged, match=r"a\.bin in s3://models/tiny: the file changed while it was being read"):
        store.read_range(file, 10, 20)
    assert store.read_range(only(store), 10, 20) == CONTENT[10:20]


def test_grown_without_a_new_etag(double: S3Double, store: ObjectStore) -> None:
    file = only(store)
    double.objects["a.bin"] += b"x"
    with pytest.raises(VersionChanged, match="listed with 1024 bytes, now 1025"):
        store.read_range(file, 0, 10)


class Tokens:
    """Credentials that get a new token each time they are asked for."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self) -> dict[str, Any]:
        self.given += 1
        return {"session_token": f"token-{self.given}"}


def test_expired_credentials_are_refreshed_once(double: S3Double) -> None:
    tokens = Tokens()
    store = ObjectStore(URI, config=double.config(), credentials=tokens, retry=QUICK)
    file = only(store)
    double.expired_tokens.add("token-1")
    assert store.read_range(file, 0, 10) == CONTENT[:10]
    assert tokens.given == 2
    double.expired_tokens |= {"token-2", "token-3"}
    before = len(double.ranges("a.bin"))
    with pytest.raises(CredentialsExpired, match=r"a\.bin in .*: the credentials have expired .*: 403 ExpiredToken"):
        store.read_range(file, 0, 10)
    assert tokens.given == 3 and len(double.ranges("a.bin")) == before + 2


def test_threads_refresh_together(double: S3Double) -> None:
    tokens = Tokens()
    store = ObjectStore(URI, config=double.config(), credentials=tokens, retry=QUICK)
    file = only(store)
    double.expired_tokens.add("token-1")
    # Both first requests are on their way before either is answered.
    barrier = threading.Barrier(2, timeout=20)
    first = len(double.requests)
    double.at_request = lambda number: barrier.wait() and None if number <= first + 2 else None
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(bytes(store.read_range(file, 0, 4)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [CONTENT[:4]] * 2 and tokens.given == 2


def test_answers_of_the_store_are_not_repeated(double: S3Double, store: ObjectStore) -> None:
    file = only(store)
    double.script.append("denied")
    with pytest.raises(AccessDenied) as caught:
        store.read_range(file, 0, 10)
    assert "top-secret-token" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


class SetWhenLogged(logging.Handler):
    """Sets an event with the first log record, which comes right before the wait for the next attempt."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        self._event.set()


@pytest.mark.parametrize("when", ["while it waits", "while it reads"])
def test_cancelling_ends_the_wait(double: S3Double, when: str) -> None:
    policy = RetryPolicy(max_attempts=2, first_delay_seconds=60, max_delay_seconds=60)
    store = ObjectStore(URI, config=double.config(), retry=policy)
    file = only(store)
    double.script.extend(["slow"] * 2)
    cancelled = threading.Event()
    handler = SetWhenLogged(cancelled)
    logger = logging.getLogger("day0.object_store")
    if when == "while it waits":
        logger.addHandler(handler)
    else:
        double.at_request = lambda _: cancelled.set()
    try:
        began = time.monotonic()
        with pytest.raises(Throttled):
            store.read_range(file, 0, 10, cancelled=cancelled)
    finally:
        logger.removeHandler(handler)
    assert time.monotonic() - began < 20
    assert len(double.ranges("a.bin")) == (2 if when == "while it waits" else 1)


def test_missing_object_and_empty_folder(double: S3Double, store: ObjectStore) -> None:
    file = only(store)
    del double.objects["a.bin"]
    with pytest.raises(ObjectMissing, match=r"a\.bin in s3://models/tiny: it does not exist: 404 NoSuchKey"):
        store.read_range(file, 0, 10)
    with pytest.raises(ObjectMissing, match="s3://models/tiny: it does not exist: the folder has no files"):
        store.list()


def test_nobody_listens(double: S3Double) -> None:
    double.stop()
    store = ObjectStore(URI, config=double.config(), retry=QUICK)
    with pytest.raises(Unreachable, match=r"tried 3 times"):
        store.list()


def test_no_tls_at_the_other_end(double: S3Double) -> None:
    config = config_of(double.endpoint.replace("http:", "https:"))
    with pytest.raises(TlsFault) as caught:
        ObjectStore(URI, config=config, retry=QUICK).list()
    assert "tried" not in str(caught.value)


def test_settings_of_the_environment(double: S3Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", double.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(PlainHttpRefused, match="AWS_ALLOW_HTTP"):
        ObjectStore(URI, retry=QUICK).list()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert only(ObjectStore(URI)).name == "a.bin"


def test_writing_is_one_request(double: S3Double, store: ObjectStore) -> None:
    store.write("b.json", b"{}")
    assert double.objects["b.json"] == b"{}"
    assert [request for request in double.requests if request[0] == "PUT"] == [("PUT", "b.json", None)]


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_local_folder(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "with space"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "x.bin").write_bytes(b"not listed")
    (tmp_path / "blob").write_bytes(CONTENT)
    # The Hugging Face cache keeps links to its blobs.
    (folder / "a.bin").symlink_to(tmp_path / "blob")
    store = ObjectStore(form.format(str(folder).replace(" ", "%20") if "://" in form else folder))
    assert store.folder == folder
    file = only(store)
    assert (file.name, file.size_bytes) == ("a.bin", 1024)
    assert store.read_range(file, 1, 5) == CONTENT[1:5]
    (tmp_path / "blob").write_bytes(CONTENT[::-1] + b"x")
    with pytest.raises(VersionChanged):
        store.read_range(file, 1, 5)
    (tmp_path / "blob").unlink()
    with pytest.raises(ObjectMissing):
        store.read_range(file, 1, 5)


def test_local_write_replaces_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(str(tmp_path))
    store.write("m.json", b"old")
    seen: list[list[str]] = []

    def full(descriptor: int) -> None:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"m\.json in .*No space left"):
            store.write("m.json", b"new content")
    # The new bytes were under another name, and no trace is left of it.
    assert len(seen[0]) == 2 and (tmp_path / "m.json").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
    store.write("m.json", b"new")
    assert (tmp_path / "m.json").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("uri", "error", "says"),
    [
        ("ftp://host/x", UnsupportedUri, "ftp://host/x: the URI is not supported: a path, file:///folder, or s3://"),
        ("s3:///x", UnsupportedUri, "s3:///x"),
        ("file://host/x", UnsupportedUri, "file://host/x"),
        ("s3://key:password@models/x", UnsupportedUri, "only a bucket and a prefix"),
        ("/no/such/folder", ObjectMissing, "/no/such/folder: it does not exist: no such folder"),
    ],
)
def test_bad_uris(uri: str, error: type[StoreError], says: str) -> None:
    with pytest.raises(error) as caught:
        ObjectStore(uri)
    assert says in str(caught.value) and "password" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "config"),
    [
        ("gs://bucket/x", {"skip_signature": "true"}),
        ("az://container/x", {"account_name": "a", "skip_signature": "true"}),
    ],
)
def test_other_clouds_can_be_opened(uri: str, config: dict[str, str]) -> None:
    store = ObjectStore(uri, config=config)
    assert (store.uri, store.folder) == (uri, None)


def test_unknown_setting_is_named() -> None:
    with pytest.raises(StoreError, match="no_such_setting"):
        ObjectStore(URI, config={"no_such_setting": "1"})


def test_delays_grow_to_the_limit() -> None:
    policy = RetryPolicy(first_delay_seconds=1, max_delay_seconds=4)
    for attempt, full in [(1, 1), (2, 2), (3, 4), (9, 4)]:
        assert full / 2 <= policy.delay_seconds(attempt) <= full
