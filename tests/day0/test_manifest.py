"""`day0 manifest` and `day0 verify` from the outside: what they print, write and exit with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from day0.cli import run
from svc_common.manifest import MANIFEST_NAME
from svc_common.object_store import ObjectStore
from tests.checkpoints import INDEX, A, B, flip, write_checkpoint
from tests.s3_double import BUCKET, PREFIX, config_of, moto


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    with moto() as endpoint:
        yield endpoint


def test_made_and_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", str(folder)], {}) == 0
    printed = capsys.readouterr().out
    written = hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
    assert printed.startswith(f"{MANIFEST_NAME}: 4 files, 6 tensors, ") and f"sha256 {written}" in printed
    assert run(["verify", f"file://{folder}"], {}) == 0
    assert capsys.readouterr().out.startswith("every byte is right: 4 files read, ")


def test_json_of_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    total = sum((folder / name).stat().st_size for name in ("config.json", INDEX, A, B))
    assert run(["manifest", str(folder), "--json"], {}) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["uri"], made["files"], made["tensors"], made["bytes"]) == (str(folder), 4, 6, total)
    assert run(["verify", str(folder), "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["bytes"], found["problems"]) == (True, total, [])


def test_wrong_bytes_end_with_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", str(folder)], {}) == 0
    flip(folder / A, -1)
    flip(folder / B, -1)
    capsys.readouterr()
    assert run(["verify", str(folder)], {}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{A}: tensor 'visual.scale': wrong bytes")
    assert lines[1].startswith(f"{B}: tensor 'visual.proj': wrong bytes")
    assert lines[2].startswith("2 problems: ")
    assert run(["verify", str(folder), "--json"], {}) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert [(problem["file"], problem["tensor"]) for problem in found["problems"]] == [
        (A, "visual.scale"),
        (B, "visual.proj"),
    ]


def test_faults_are_said_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(folder)], {}) == 1
    assert "`day0 manifest` makes it" in capsys.readouterr().err
    (folder / B).unlink()
    assert run(["manifest", str(folder)], {}) == 1
    assert capsys.readouterr().err == f"day0: {INDEX}: weight files are missing: {B}\n"
    assert not (folder / MANIFEST_NAME).exists()
    assert run(["manifest", "/no/such/folder"], {}) == 1
    assert capsys.readouterr().err == "day0: /no/such/folder: it does not exist: no such folder\n"


def test_in_an_object_store(
    folder: Path, moto_endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"s3://{BUCKET}/{PREFIX}"
    store = ObjectStore(uri, config=config_of(moto_endpoint))
    for path in folder.iterdir():
        store.write(path.name, path.read_bytes())
    for name, text in {
        "AWS_ENDPOINT_URL": moto_endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, text)
    assert run(["manifest", uri, "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 6
    assert run(["verify", uri, "--memory-mib", "1"], {}) == 0
    flip(folder / B, -1)
    store.write(B, (folder / B).read_bytes())
    capsys.readouterr()
    assert run(["verify", uri], {}) == 1
    assert capsys.readouterr().out.startswith(f"{B}: tensor 'visual.proj': wrong bytes")


def test_the_tiny_checkpoint(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from safetensors import safe_open

    for path in tiny_checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert run(["manifest", str(tmp_path)], {}) == 0
    document = json.loads((tmp_path / MANIFEST_NAME).read_text())
    for file in sorted(tmp_path.glob("*.safetensors")):
        tensors = document["files"][file.name]["tensors"]
        with safe_open(file, "pt") as library:
            assert set(library.keys()) == set(tensors)
            for name in tensors:
                one = library.get_slice(name)
                assert (tensors[name]["dtype"], tensors[name]["shape"]) == (one.get_dtype(), one.get_shape())
    assert run(["verify", str(tmp_path)], {}) == 0
