"""The packages that hold the font files are the ones that training/demo/requirements.txt installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.demo import collect_assets
from training.demo.faces import FACES, Face

REQUIREMENTS = Path(collect_assets.__file__).with_name("requirements.txt")


def test_requirements_name_every_package_pinned() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    named = {line.split("==")[0] for line in lines}
    assert named == {face.package.replace("_", "-") for face in FACES} | {"scikit-learn"}


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no_such_fonts is not installed; pip install -r"):
        collect_assets.package_folder("no_such_fonts")


def test_files_are_gathered_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_fonts"
    (package / "files").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "files" / "Some.ttf").write_bytes(b"x" * 100)
    (package / "digits").write_bytes(b"y" * 10)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(collect_assets, "FACES", (Face("some_fonts", "Some.ttf", "train"),))
    monkeypatch.setattr(collect_assets, "DIGITS", ("some_fonts", "digits"))
    assert collect_assets.collect(tmp_path / "out") == 110
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Some.ttf", "digits"]
    monkeypatch.setattr(collect_assets, "MAX_BYTES", 109)
    with pytest.raises(ValueError, match="assets have 110 bytes; at most 109 can travel"):
        collect_assets.collect(tmp_path / "out")
