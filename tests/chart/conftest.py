"""The helm that the chart is rendered with; a machine that cannot have it fails the tests, it does not skip them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.chart.rendering import Helm
from tools.fetch_helm import FOLDER, fetch


@pytest.fixture(scope="session")
def helm() -> Helm:
    """HELM of the environment, else the pinned one, fetched once for all workers of a run."""
    named = os.environ.get("HELM")
    if named:
        return Helm(Path(named))
    FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(FOLDER.parent / "helm.lock"):
        return Helm(fetch())
