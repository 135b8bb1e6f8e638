"""Where the model that comes with the package is, and the held-out set it is judged by; reads neither."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
MODEL_NAME = "day0-demo"


def embedded_model() -> Path:
    """Folder of the checkpoint. FileNotFoundError where the package was installed without its data."""
    return _present(_FOLDER / MODEL_NAME / "config.json").parent


def embedded_held_out() -> Path:
    """The file that `day0.heldout` reads. FileNotFoundError where the package was installed without its data."""
    return _present(_FOLDER / "held-out.jsonl.xz")


def _present(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: this installation of day0 lacks its package data")
    return path
