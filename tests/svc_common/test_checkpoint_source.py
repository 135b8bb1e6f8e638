"""A checkpoint is the same thing wherever it lies: its small files at hand, its weights as a checked stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from svc_common import checkpoint_source
from svc_common.checkpoint_errors import CheckpointError, DigestMismatch, ManifestFault
from svc_common.checkpoint_source import CheckpointSource
from svc_common.digests import make_manifest
from svc_common.manifest import write_manifest
from svc_common.object_store import ObjectStore
from svc_common.store_errors import ObjectMissing
from tests.checkpoints import INDEX, A, flip, write_checkpoint, write_index
from tests.s3_double import BUCKET, moto

URI = f"s3://{BUCKET}/some/model"


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, bytes]:
    return write_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def bucket() -> Iterator[None]:
    with moto() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        yield


def add_manifest(folder: Path) -> None:
    store = ObjectStore(str(folder))
    write_manifest(store, make_manifest(store))


def upload(folder: Path) -> None:
    for file in folder.iterdir():
        ObjectStore(URI).write(file.name, file.read_bytes())


def test_local_folder_is_used_as_it_is(tmp_path: Path, contents: dict[str, bytes]) -> None:
    source = CheckpointSource(str(tmp_path))
    assert (source.folder, source.name, source.manifest) == (tmp_path, tmp_path.name, None)
    streamed = {tensor.name: bytes(tensor.buffer) for tensor in source.weights().tensors()}
    assert streamed == contents
    source.close()
    assert (tmp_path / "config.json").is_file()


def test_bucket_gives_the_same_and_leaves_nothing(bucket: None, tmp_path: Path, contents: dict[str, bytes]) -> None:
    add_manifest(tmp_path)
    upload(tmp_path)
    local, source = CheckpointSource(str(tmp_path)), CheckpointSource(URI, require_manifest=True, budget_bytes=512)
    assert source.name == "model" and source.digest == local.digest
    assert source.manifest == local.manifest is not None
    assert (source.folder / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert not list(source.folder.glob("*.safetensors")), "weights are streamed, not copied"
    chosen = {t.name: bytes(t.buffer) for t in source.weights(lambda name: name.startswith("visual.")).tensors()}
    assert chosen == {name: data for name, data in contents.items() if name.startswith("visual.")}
    folder = source.folder
    source.close()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_wrong_byte_of_a_small_file_is_named(tmp_path: Path, contents: dict[str, bytes], name: str) -> None:
    add_manifest(tmp_path)
    flip(tmp_path / name, -2)
    with pytest.raises(DigestMismatch, match=f"{name}: wrong bytes"):
        CheckpointSource(str(tmp_path))


def test_failed_fetch_leaves_nothing(
    bucket: None, tmp_path: Path, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(checkpoint_source.tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(checkpoint_source, "MAX_SMALL_FILES_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"files beside the weights are [0-9]+ bytes, over 10"):
        CheckpointSource(URI)
    assert not list(temporary.iterdir())


def test_digest_follows_configuration_index_and_weight_files(tmp_path: Path, contents: dict[str, bytes]) -> None:
    digests = [CheckpointSource(str(tmp_path)).digest]
    (tmp_path / "config.json").write_text("{}")
    digests.append(CheckpointSource(str(tmp_path)).digest)
    write_index(tmp_path, {"text.embed": A})
    digests.append(CheckpointSource(str(tmp_path)).digest)
    (tmp_path / A).write_bytes((tmp_path / A).read_bytes() + b"x")
    digests.append(CheckpointSource(str(tmp_path)).digest)
    assert len(set(digests)) == 4
    (tmp_path / "README.md").write_text("other words")
    assert CheckpointSource(str(tmp_path)).digest == digests[-1]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, contents: dict[str, bytes]) -> None:
    with pytest.raises(ManifestFault, match="`day0 manifest` makes it"):
        CheckpointSource(str(tmp_path), require_manifest=True)
    with pytest.raises(ObjectMissing):
        CheckpointSource(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: is not in"):
        CheckpointSource(str(tmp_path))
