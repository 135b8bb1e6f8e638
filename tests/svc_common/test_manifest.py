"""A manifest holds what any other tool computes, is the same wherever it is made, and tells every wrong byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from svc_common.checkpoint_errors import (
    CheckpointError,
    HeaderError,
    IndexFault,
    ManifestFault,
    ShardsMissing,
    TensorAbsent,
)
from svc_common.digests import Verification, make_manifest, verify_checkpoint
from svc_common.manifest import MANIFEST_NAME, parse_manifest, read_manifest, write_manifest
from svc_common.object_store import ObjectStore, RetryPolicy
from svc_common.piece_reader import ReadLimits
from svc_common.store_errors import ObjectMissing, VersionChanged
from tests.checkpoints import INDEX, SHARDS, A, B, flip, write_checkpoint, write_index, write_safetensors
from tests.s3_double import BUCKET, PREFIX, S3Double, config_of, moto

QUICK = RetryPolicy(max_attempts=3, first_delay_seconds=0.001, max_delay_seconds=0.002)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_checkpoint(folder)
    return folder


@pytest.fixture
def signed(folder: Path) -> Path:
    """The checkpoint with its manifest."""
    store = ObjectStore(str(folder))
    write_manifest(store, make_manifest(store))
    return folder


def verify(folder: Path) -> Verification:
    return verify_checkpoint(ObjectStore(str(folder)))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("piece_bytes", [1, 7, 16 * 1024 * 1024])
def test_digests_are_those_of_the_bytes(folder: Path, piece_bytes: int) -> None:
    contents = write_checkpoint(folder)
    limits = ReadLimits(budget_bytes=10 * piece_bytes, piece_bytes=piece_bytes)
    seen: list[tuple[int, int]] = []
    store = ObjectStore(str(folder))
    manifest = make_manifest(store, limits=limits, progress=lambda done, expected: seen.append((done, expected)))
    assert set(manifest.files) == {"config.json", INDEX, A, B}
    for name, digest in manifest.files.items():
        content = (folder / name).read_bytes()
        assert (digest.size_bytes, digest.sha256) == (len(content), sha256(content))
    for file, entries in SHARDS.items():
        digest = manifest.files[file]
        content = (folder / file).read_bytes()
        assert digest.header_sha256 == sha256(content[: 8 + int.from_bytes(content[:8], "little")])
        found = {name: (one.dtype, one.shape, one.size_bytes, one.sha256) for name, one in digest.tensors.items()}
        assert found == {
            name: (dtype, shape, len(contents[name]), sha256(contents[name]))
            for name, (dtype, shape) in entries.items()
        }
    assert manifest.config_sha256 == sha256((folder / "config.json").read_bytes())
    assert manifest.index_sha256 == sha256((folder / INDEX).read_bytes())
    total = sum(digest.size_bytes for digest in manifest.files.values())
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_round_trip_through_the_file(signed: Path) -> None:
    store = ObjectStore(str(signed))
    manifest = read_manifest(store, {file.name: file for file in store.list()})
    assert manifest == make_manifest(store)
    assert parse_manifest(manifest.to_json()) == manifest
    assert manifest.sha256 == sha256((signed / MANIFEST_NAME).read_bytes())


def test_sound_checkpoint_verifies(signed: Path) -> None:
    (signed / "README.md").write_text("other words")
    found = verify(signed)
    assert found.problems == () and found.files == 4
    assert found.size_bytes == sum((signed / name).stat().st_size for name in ("config.json", INDEX, A, B))


def damage_header(folder: Path) -> None:
    content = (folder / A).read_bytes()
    # Still a valid header: the tensor has another name.
    (folder / A).write_bytes(content.replace(b"text.embed", b"text.emben"))


def damage_shape(folder: Path) -> None:
    content = (folder / A).read_bytes()
    (folder / A).write_bytes(content.replace(b"[40, 16]", b"[16, 40]"))


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (lambda folder: flip(folder / A, -1), [(A, "visual.scale", "wrong bytes")]),
        (lambda folder: flip(folder / B, -1), [(B, "visual.proj", "wrong bytes")]),
        (damage_header, [(A, None, "wrong bytes: sha256 of the header")]),
        (damage_shape, [(A, None, "wrong bytes: sha256 of the header")]),
        (lambda folder: flip(folder / B, 0), [(B, None, "wrong bytes: sha256 of the header")]),
        (lambda folder: flip(folder / B, 7), [(B, None, "above the limit")]),
        (lambda folder: flip(folder / INDEX, 3), [(INDEX, None, "wrong bytes")]),
        (lambda folder: flip(folder / "config.json", 3), [("config.json", None, "wrong bytes")]),
        (lambda folder: (folder / B).unlink(), [(B, None, "the file is missing")]),
        (lambda folder: (folder / B).write_bytes((folder / B).read_bytes()[:-1]), [(B, None, "the manifest has")]),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), [("tokenizer.json", None, "does not cover")]),
        (
            lambda folder: (flip(folder / A, -1), flip(folder / B, -1)),
            [(A, "visual.scale", "wrong bytes"), (B, "visual.proj", "wrong bytes")],
        ),
    ],
)
def test_every_damage_is_told(
    signed: Path, damage: Callable[[Path], object], problems: list[tuple[str, str, str]]
) -> None:
    damage(signed)
    found = verify(signed).problems
    assert [(problem.file, problem.tensor) for problem in found] == [(file, tensor) for file, tensor, _ in problems]
    assert all(says in problem.problem for problem, (_, _, says) in zip(found, problems, strict=True))


def test_every_flipped_byte_of_a_shard_is_found(signed: Path) -> None:
    size = (signed / A).stat().st_size
    for offset in range(0, size, max(1, size // 60)):
        flip(signed / A, offset)
        assert verify(signed).problems, offset
        flip(signed / A, offset)
    assert not verify(signed).problems


def test_single_file_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    contents = write_safetensors(tmp_path / "model.safetensors", SHARDS[A])
    store = ObjectStore(str(tmp_path))
    manifest = make_manifest(store)
    assert manifest.index_sha256 is None
    assert manifest.files["model.safetensors"].tensors["text.embed"].sha256 == sha256(contents["text.embed"])
    write_manifest(store, manifest)
    assert verify(tmp_path).problems == ()


@pytest.mark.parametrize("names", [("a", "empty"), ("empty", "a"), ("empty",), ()])
def test_empty_tensors_have_a_digest(tmp_path: Path, names: tuple[str, ...]) -> None:
    entries = {"a": ("U8", (3,)), "empty": ("F32", (0, 8))}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty.json").write_bytes(b"")
    contents = write_safetensors(tmp_path / "model.safetensors", {name: entries[name] for name in names})
    manifest = make_manifest(ObjectStore(str(tmp_path)))
    digests = manifest.files["model.safetensors"].tensors
    assert {name: digest.sha256 for name, digest in digests.items()} == {name: sha256(contents[name]) for name in names}
    assert manifest.files["empty.json"].sha256 == sha256(b"")


def test_stray_weights_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(folder / "model.safetensors", SHARDS[A])
    assert "model.safetensors" not in make_manifest(ObjectStore(str(folder))).files
    assert [record.files for record in caplog.records] == [["model.safetensors"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda folder: (folder / B).unlink(), ShardsMissing, f"{INDEX}: weight files are missing: {B}"),
        (lambda folder: [(folder / name).unlink() for name in (A, B)], ShardsMissing, f"missing: {A}, {B}"),
        (lambda folder: write_index(folder, {"text.embed": B}), TensorAbsent, f"{B}: tensor 'text.embed': the index"),
        (lambda folder: write_index(folder, {}), IndexFault, "maps no tensor names"),
        (lambda folder: write_index(folder, {"a": "../x.safetensors"}), IndexFault, "tensor 'a': '../x.safetensors'"),
        (lambda folder: (folder / INDEX).write_text("{"), IndexFault, f"{INDEX}: is no weight index"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": 3}'), IndexFault, "maps no tensor names"),
        (
            lambda folder: (folder / INDEX).write_text(f'{{"weight_map": {{"a": "{A}", "a": "{B}"}}}}'),
            IndexFault,
            "'a' appears twice",
        ),
        (lambda folder: (folder / INDEX).unlink(), IndexFault, "has neither"),
        (lambda folder: (folder / "config.json").unlink(), IndexFault, "has no config.json"),
        (lambda folder: (folder / A).write_bytes(b"\0" * 7), HeaderError, f"{A}: 7 bytes"),
    ],
)
def test_no_manifest_of_a_broken_checkpoint(
    folder: Path, damage: Callable[[Path], object], error: type[CheckpointError], says: str
) -> None:
    damage(folder)
    with pytest.raises(error) as caught:
        make_manifest(ObjectStore(str(folder)))
    assert type(caught.value) is error and says in str(caught.value)


def edit(field: str, item: object) -> Callable[[dict[str, object]], object]:
    return lambda document: document.update({field: item})


@pytest.mark.parametrize(
    "change",
    [
        edit("format", "day0-manifest/2"),
        edit("config_sha256", "0" * 64),
        edit("config_sha256", "xyz"),
        edit("index_sha256", None),
        edit("files", []),
        lambda document: document["files"][A].pop("bytes"),
        lambda document: document["files"][A].update(bytes=-1),
        lambda document: document["files"][A]["tensors"]["text.embed"].update(sha256="A" * 64),
        lambda document: document["files"][A]["tensors"]["text.embed"].update(shape=["a"]),
        lambda document: document["files"][A]["tensors"]["text.embed"].update(dtype=3),
    ],
)
def test_bad_manifests_are_refused(signed: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads((signed / MANIFEST_NAME).read_text())
    change(document)
    with pytest.raises(ManifestFault, match=f"^{MANIFEST_NAME}: is no manifest"):
        parse_manifest(json.dumps(document).encode())


def test_manifest_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ManifestFault, match="`day0 manifest` makes it"):
        verify(folder)


def test_index_removed_after_signing(signed: Path) -> None:
    (signed / INDEX).unlink()
    assert [(problem.file, problem.problem) for problem in verify(signed).problems] == [(INDEX, "the file is missing")]


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    with moto() as endpoint:
        yield endpoint


def test_same_manifest_from_s3(folder: Path, moto_endpoint: str) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{PREFIX}", config=config_of(moto_endpoint))
    with pytest.raises(ObjectMissing):
        store.list()
    for path in folder.iterdir():
        store.write(path.name, path.read_bytes())
    store.write("inner/model.safetensors", b"another folder")
    manifest = make_manifest(store, limits=ReadLimits(budget_bytes=4096, piece_bytes=100))
    assert manifest == make_manifest(ObjectStore(str(folder)))
    write_manifest(store, manifest)
    assert verify_checkpoint(store).problems == ()
    flip(folder / B, -1)
    store.write(B, (folder / B).read_bytes())
    assert [(problem.file, problem.tensor) for problem in verify_checkpoint(store).problems] == [(B, "visual.proj")]


def test_replaced_while_it_is_hashed(folder: Path) -> None:
    double = S3Double()
    try:
        for path in folder.iterdir():
            double.put(path.name, path.read_bytes())
        store = ObjectStore(f"s3://{BUCKET}/{PREFIX}", config=double.config(), retry=QUICK)
        # The first ranges are the index and the two headers.
        double.script.extend(["ok", "ok", "ok", "replace"])
        with pytest.raises(VersionChanged):
            make_manifest(store, limits=ReadLimits(budget_bytes=64, piece_bytes=16))
    finally:
        double.stop()


def test_copy_has_the_same_manifest(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert make_manifest(ObjectStore(str(copy))).to_json() == make_manifest(ObjectStore(str(folder))).to_json()
