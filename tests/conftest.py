"""Fixtures every test package shares; knows no service."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny glm5_next checkpoint, written once for all workers of a run."""
    # Under xdist the base of a worker is a child of the run's own; the lock makes the first worker write for all.
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    folder = shared / "tiny-glm5_next"
    with FileLock(shared / "tiny-glm5_next.lock"):
        if not (folder / "config.json").exists():
            from day0.tiny import write_tiny_checkpoint

            partial = shared / "tiny-glm5_next.partial"
            write_tiny_checkpoint(partial)
            partial.rename(folder)
    return folder
