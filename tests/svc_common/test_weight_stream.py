"""The chosen tensors arrive once, whole and checked, or the error says which file and tensor is wrong and why."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from svc_common.checkpoint_errors import (
    CheckpointError,
    DigestMismatch,
    ManifestFault,
    ShardsMissing,
    TensorAbsent,
)
from svc_common.digests import make_manifest
from svc_common.manifest import Manifest
from svc_common.object_store import ObjectStore, RetryPolicy
from svc_common.piece_reader import ReadLimits
from svc_common.store_errors import (
    BodyCut,
    CredentialsExpired,
    RangeIgnored,
    ShortRange,
    StoreError,
    Throttled,
    VersionChanged,
)
from svc_common.weight_stream import WeightStream, open_weights
from tests.checkpoints import INDEX, SHARDS, A, B, flip, write_checkpoint, write_index, write_safetensors
from tests.s3_double import BUCKET, PREFIX, S3Double, config_of, moto

URI = f"s3://{BUCKET}/{PREFIX}"
QUICK = RetryPolicy(max_attempts=3, first_delay_seconds=0.001, max_delay_seconds=0.002)
SMALL = ReadLimits(budget_bytes=512, piece_bytes=64, readers=4)


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, bytes]:
    return write_checkpoint(tmp_path)


@pytest.fixture
def manifest(tmp_path: Path, contents: dict[str, bytes]) -> Manifest:
    return make_manifest(ObjectStore(str(tmp_path)))


@pytest.fixture
def double(tmp_path: Path, contents: dict[str, bytes]) -> Iterator[S3Double]:
    double = S3Double()
    upload(tmp_path, double.put)
    yield double
    double.stop()


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    with moto() as endpoint:
        yield endpoint


def upload(folder: Path, put: Callable[[str, bytes], object]) -> None:
    for path in folder.iterdir():
        put(path.name, path.read_bytes())


def read(stream: WeightStream) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for tensor in stream.tensors():
        assert tensor.name not in found
        found[tensor.name] = bytes(tensor.buffer)
    return found


@pytest.mark.parametrize("limits", [SMALL, ReadLimits(), ReadLimits(1, 1, 1), ReadLimits(100, 33, 2)])
def test_all_tensors_once(tmp_path: Path, contents: dict[str, bytes], manifest: Manifest, limits: ReadLimits) -> None:
    stream = open_weights(ObjectStore(str(tmp_path)), manifest, limits=limits)
    assert stream.files == (A, B) and stream.expected_bytes == sum(map(len, contents.values()))
    seen: list[tuple[int, int]] = []
    order = []
    for tensor in stream.tensors(lambda done, expected: seen.append((done, expected))):
        order.append(tensor.name)
        assert (tensor.dtype, tensor.shape) == SHARDS[tensor.file][tensor.name]
        assert bytes(tensor.buffer) == contents[tensor.name]
        # The caller's own: writing into it is allowed.
        tensor.buffer[:1] = tensor.buffer[:1]
    assert order == [name for entries in SHARDS.values() for name in entries] == list(stream.spans)
    assert seen[-1] == (stream.expected_bytes, stream.expected_bytes) and seen == sorted(seen)


def test_only_what_is_chosen_is_read(double: S3Double, contents: dict[str, bytes], manifest: Manifest) -> None:
    store = ObjectStore(URI, config=double.config(), retry=QUICK)
    stream = open_weights(store, manifest, select=lambda name: name == "visual.scale", limits=SMALL)
    opened = len(double.ranges(A))
    assert double.ranges(B) == [] and stream.files == (A,) and stream.expected_bytes == 3
    assert read(stream) == {"visual.scale": contents["visual.scale"]}
    span = stream.spans["visual.scale"]
    assert double.ranges(A)[opened:] == [f"bytes={span.start}-{span.stop - 1}"]


def test_neighbours_share_a_request(double: S3Double, contents: dict[str, bytes], manifest: Manifest) -> None:
    stream = open_weights(ObjectStore(URI, config=double.config()), manifest, select=lambda name: "visual" in name)
    opened = len(double.ranges(B))
    assert set(read(stream)) == {"visual.scale", "visual.odd", "visual.proj"}
    assert len(double.ranges(B)) == opened + 1


def test_from_moto(tmp_path: Path, contents: dict[str, bytes], manifest: Manifest, moto_endpoint: str) -> None:
    store = ObjectStore(URI, config=config_of(moto_endpoint))
    upload(tmp_path, store.write)
    assert read(open_weights(store, manifest, limits=SMALL)) == contents
    stream = open_weights(store, manifest, limits=SMALL)
    tensors = stream.tensors()
    next(tensors)
    content = (tmp_path / B).read_bytes()
    store.write(B, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(VersionChanged, match=B):
        list(tensors)
    with pytest.raises(DigestMismatch, match=rf"{B}: tensor 'visual.proj': wrong bytes"):
        read(open_weights(store, manifest, limits=SMALL))


def test_single_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    contents = write_safetensors(tmp_path / "model.safetensors", SHARDS[A])
    store = ObjectStore(str(tmp_path))
    assert read(open_weights(store, make_manifest(store))) == contents
    assert list(read(open_weights(store, None, select=lambda name: "visual" in name))) == ["visual.scale"]


def test_gap_as_long_as_a_piece(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    entries = {name: ("U8", (64,)) for name in "abc"}
    contents = write_safetensors(tmp_path / "model.safetensors", entries)
    stream = open_weights(ObjectStore(str(tmp_path)), None, select=lambda name: name != "b", limits=SMALL)
    assert read(stream) == {"a": contents["a"], "c": contents["c"]}


def test_missing_shards_come_before_any_read(double: S3Double, manifest: Manifest) -> None:
    del double.objects[A], double.objects[B]
    with pytest.raises(ShardsMissing) as caught:
        open_weights(ObjectStore(URI, config=double.config()), manifest)
    assert caught.value.files == (A, B) and str(caught.value) == f"{INDEX}: weight files are missing: {A}, {B}"
    assert {name for _, name, _ in double.requests} == {"", INDEX}


def test_only_needed_shards_must_be_there(tmp_path: Path, contents: dict[str, bytes], manifest: Manifest) -> None:
    (tmp_path / B).unlink()
    stream = open_weights(ObjectStore(str(tmp_path)), manifest, select=lambda name: name == "text.embed")
    assert read(stream) == {"text.embed": contents["text.embed"]}


def test_the_index_decides(tmp_path: Path, contents: dict[str, bytes], caplog: pytest.LogCaptureFixture) -> None:
    # Both shards have text.embed now, and a stray has it as well.
    both = write_safetensors(tmp_path / B, {**SHARDS[B], "text.embed": ("BF16", (40, 16))}, seed=1)
    write_safetensors(tmp_path / "model.safetensors", SHARDS[A], seed=2)
    write_index(tmp_path, {"text.embed": B, "text.head": B})
    store = ObjectStore(str(tmp_path))
    found = read(open_weights(store, make_manifest(store)))
    assert found == {"text.embed": both["text.embed"], "text.head": both["text.head"]}
    assert found["text.embed"] != contents["text.embed"]
    strays = sorted([A, "model.safetensors"])
    assert [record.files for record in caplog.records] == [strays, strays]  # type: ignore[attr-defined]


def test_name_absent_from_its_shard(tmp_path: Path, contents: dict[str, bytes]) -> None:
    write_index(tmp_path, {"text.embed": A, "visual.odd": A, "visual.proj": A})
    with pytest.raises(TensorAbsent) as caught:
        open_weights(ObjectStore(str(tmp_path)), None)
    assert (caught.value.file, caught.value.tensor) == (A, "visual.odd") and "1 more" in str(caught.value)


def test_nothing_chosen(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(TensorAbsent, match="none of the tensors"):
        open_weights(ObjectStore(str(tmp_path)), manifest, select=lambda _: False)


def rename_in_header(folder: Path) -> None:
    (folder / A).write_bytes((folder / A).read_bytes().replace(b"text.embed", b"text.emben"))


def swap_in_header(folder: Path) -> None:
    (folder / A).write_bytes((folder / A).read_bytes().replace(b"[40, 16]", b"[16, 40]"))


@pytest.mark.parametrize(
    ("damage", "error", "file", "tensor"),
    [
        (rename_in_header, DigestMismatch, A, None),
        (swap_in_header, DigestMismatch, A, None),
        (lambda folder: flip(folder / INDEX, 20), DigestMismatch, INDEX, None),
        (lambda folder: flip(folder / INDEX, 0), DigestMismatch, INDEX, None),
        (lambda folder: flip(folder / A, 8), DigestMismatch, A, None),
        (lambda folder: flip(folder / A, 0), DigestMismatch, A, None),
        (lambda folder: (folder / B).write_bytes((folder / B).read_bytes() + b"x"), DigestMismatch, B, None),
        (lambda folder: flip(folder / A, -1), DigestMismatch, A, "visual.scale"),
        (lambda folder: flip(folder / A, -4), DigestMismatch, A, "text.embed"),
        (lambda folder: flip(folder / B, -1), DigestMismatch, B, "visual.proj"),
        (lambda folder: flip(folder / B, -201), DigestMismatch, B, "visual.odd"),
    ],
)
def test_a_wrong_byte_never_passes(
    tmp_path: Path,
    manifest: Manifest,
    damage: Callable[[Path], object],
    error: type[CheckpointError],
    file: str,
    tensor: str | None,
) -> None:
    damage(tmp_path)
    names: list[str] = []
    with pytest.raises(error) as caught:
        for one in open_weights(ObjectStore(str(tmp_path)), manifest, limits=SMALL).tensors():
            names.append(one.name)
    assert (caught.value.file, caught.value.tensor) == (file, tensor)
    assert str(caught.value).startswith(file) and tensor not in names


def test_index_gone_and_a_single_file_in_its_place(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / INDEX).unlink()
    write_safetensors(tmp_path / "model.safetensors", SHARDS[A])
    with pytest.raises(DigestMismatch, match=f"{INDEX}: the file is missing"):
        open_weights(ObjectStore(str(tmp_path)), manifest)


def test_manifest_of_something_else(tmp_path: Path, manifest: Manifest) -> None:
    other = Manifest(manifest.config_sha256, manifest.index_sha256, {INDEX: manifest.files[INDEX]})
    with pytest.raises(ManifestFault, match=f"does not cover the file {A}"):
        open_weights(ObjectStore(str(tmp_path)), other)


@pytest.mark.parametrize("fault", ["slow", "cut", "short", "short_range", "reset"])
def test_passing_trouble_changes_nothing(
    double: S3Double, contents: dict[str, bytes], manifest: Manifest, fault: str
) -> None:
    # The readers take turns as they like, so one request may meet every fault and then a connection that was reset.
    patient = RetryPolicy(max_attempts=8, first_delay_seconds=0.001, max_delay_seconds=0.002)
    stream = open_weights(ObjectStore(URI, config=double.config(), retry=patient), manifest, limits=SMALL)
    double.script.extend([fault, "ok", fault, "ok", "ok", fault])
    assert read(stream) == contents
    assert not double.script


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("slow", Throttled),
        ("cut", BodyCut),
        ("short", ShortRange),
        ("whole", RangeIgnored),
        ("replace", VersionChanged),
    ],
)
def test_lasting_trouble_ends_the_stream(
    double: S3Double, manifest: Manifest, fault: str, error: type[StoreError]
) -> None:
    stream = open_weights(ObjectStore(URI, config=double.config(), retry=QUICK), manifest, limits=SMALL)
    double.script.extend([fault] * 100)
    with pytest.raises(error, match=A):
        read(stream)
    assert_no_threads()


def test_credentials_expire_in_mid_stream(double: S3Double, contents: dict[str, bytes], manifest: Manifest) -> None:
    # Requests under way may each ask for new ones before the first of them gives up.
    tokens = itertools.chain(["first", "second"], itertools.repeat("third"))
    credentials = lambda: {"session_token": next(tokens)}  # noqa: E731
    store = ObjectStore(URI, config=double.config(), credentials=credentials, retry=QUICK)
    stream = open_weights(store, manifest, limits=SMALL)
    double.expired_tokens.add("first")
    assert read(stream) == contents
    double.expired_tokens |= {"second", "third"}
    with pytest.raises(CredentialsExpired):
        read(stream)


def test_closing_ends_all_requests(double: S3Double, manifest: Manifest) -> None:
    stream = open_weights(ObjectStore(URI, config=double.config(), retry=QUICK), manifest, limits=SMALL)
    tensors = stream.tensors()
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    assert_no_threads()
    sent = len(double.requests)
    assert sent < len(double.objects[A]) // 64 + len(double.objects[B]) // 64


def assert_no_threads() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("day0-")]


def test_requests_overlap(double: S3Double, contents: dict[str, bytes], manifest: Manifest) -> None:
    """Four pieces fit the budget beside the tensor: the store must have four requests at once."""
    stream = open_weights(ObjectStore(URI, config=double.config()), manifest, limits=ReadLimits(512, 64, 8))
    sent = len(double.requests)
    together = threading.Barrier(4, timeout=20)
    first = threading.Event()

    def wait(number: int) -> None:
        if sent < number <= sent + 4:
            together.wait()
            first.set()

    double.at_request = wait
    tensors = stream.tensors()
    assert bytes(next(tensors).buffer) == contents["text.embed"]
    assert first.is_set()
    tensors.close()  # type: ignore[attr-defined]


def test_memory_is_the_budget_and_a_tensor(tmp_path: Path) -> None:
    """For a caller that keeps nothing; tensors that are kept are held once, in the buffer they were read into."""
    (tmp_path / "config.json").write_text("{}")
    mebi = 1024 * 1024
    write_safetensors(tmp_path / "model.safetensors", {f"t{number}": ("U8", (mebi,)) for number in range(24)})
    stream = open_weights(ObjectStore(str(tmp_path)), None, limits=ReadLimits(4 * mebi, mebi // 4, 4))
    kept = []
    for keep, most in ((False, 5 * mebi), (True, 25 * mebi)):
        tracemalloc.start()
        try:
            for tensor in stream.tensors():
                if keep:
                    kept.append(tensor)
                del tensor
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < most + mebi // 2
