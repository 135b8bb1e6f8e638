"""The layers hold, as written in pyproject.toml and as seen by a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def modules_of(package: str) -> list[str]:
    names = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize("package", ["router_svc", "svc_common"])
def test_light_packages_load_neither_torch_nor_transformers(package: str) -> None:
    modules = modules_of(package)
    assert len(modules) > 5
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n    importlib.import_module(name)\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {found}' if found else 0)\n"
    )
    done = run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr


def test_help_loads_no_model_library() -> None:
    script = (
        "import sys\nfrom day0.cli import run\ncode = run(['--help'], {})\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {found}' if found else code)\n"
    )
    done = run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    assert "day0 serve" in done.stdout
