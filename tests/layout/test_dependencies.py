"""pyproject.toml declares what each package imports, and constraints.txt pins all of it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {
    "tests",
    "tools",
    "benchmarks",
    "training",
    "protos",
    "svc_common",
    "day0_kernels",
    "router_svc",
    "llm_svc",
    "vision_svc",
    "day0",
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Distributions of the base and of some extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return {normal(re.match(r"[\w.-]+", line).group()) for line in lines}  # type: ignore[union-attr]


@cache
def distributions_of() -> dict[str, set[str]]:
    return {name: {normal(owner) for owner in owners} for name, owners in packages_distributions().items()}


def foreign_imports(folder: str) -> dict[str, str]:
    """Imported names that are neither ours nor the standard library's, with a file that imports them."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module]
            for name in names:
                root = name.split(".")[0]
                if root not in OURS and root not in sys.stdlib_module_names:
                    found[root] = str(path.relative_to(ROOT))
    return found


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("svc_common", ("s3", "cluster")),
        ("protos", ()),
        ("router_svc", ("router",)),
        ("vision_svc", ("vision",)),
        ("llm_svc", ("llm",)),
        ("kernels", ("llm", "cuda")),
        ("day0", ("llm", "vision", "tools")),
        ("tests", ("router", "vision", "llm", "dev")),
        ("tools", ("dev",)),
        ("benchmarks", ("llm", "dev")),
    ],
)
def test_imports_are_declared(folder: str, extras: tuple[str, ...]) -> None:
    allowed = declared(*extras)
    # `google` is a name several distributions share; the base declares all that we use.
    missing = {
        name: path
        for name, path in foreign_imports(folder).items()
        if not distributions_of().get(name, {name}) & allowed and name != "google"
    }
    assert not missing


def test_the_router_stays_light() -> None:
    assert not declared("router") & {"torch", "transformers", "numpy", "pillow"}


def test_constraints_pin_every_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {normal(line.split("==")[0]) for line in lines}
    assert declared("router", "vision", "llm", "cuda", "dev") <= pinned
    assert len(pinned) == len(lines), "a name is pinned twice"
