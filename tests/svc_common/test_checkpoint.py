"""A checkpoint's name changes with every file it stands for."""

from __future__ import annotations

from pathlib import Path

from svc_common.checkpoint import INDEX_NAME, checkpoint_digest, versions_of


def test_digest_depends_on_configuration_index_and_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    digests = [checkpoint_digest(tmp_path)]
    for name, text in [
        ("config.json", '{"a": 1}'),
        (INDEX_NAME, "{}"),
        ("a.safetensors", "x"),
        ("a.safetensors", "xy"),
    ]:
        (tmp_path / name).write_text(text)
        digests.append(checkpoint_digest(tmp_path))
    assert len(set(digests)) == 5
    (tmp_path / "README.md").write_text("notes")
    assert checkpoint_digest(tmp_path) == digests[-1]


def test_versions_are_those_installed() -> None:
    from importlib.metadata import version

    assert versions_of("grpcio", "no-such-distribution") == {
        "grpcio": version("grpcio"),
        "no-such-distribution": "not installed",
    }
