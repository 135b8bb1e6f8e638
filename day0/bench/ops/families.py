"""Finds the modules of a package that have operator shapes or peers, without importing any of them."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "day0.bench.ops"
PEERS = "day0.bench.ops.peers"


def modules_with(function: str, package: str) -> tuple[str, ...]:
    """Full names of the modules of `package` that define `function` at their top, in the order of their names."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    found = []
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.py")):
            tree = ast.parse(path.read_text())
            if any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body):
                found.append(f"{package}.{path.stem}")
    return tuple(found)


def families(package: str = PACKAGE) -> tuple[str, ...]:
    """Modules with `shapes()`."""
    return modules_with("shapes", package)


def name_of(module: str) -> str:
    """The family's own name, the last part of its module's."""
    return module.rpartition(".")[2]


class Selection:
    """What `--only` asks for: families by their name, or shapes by a part of `operator shape`."""

    def __init__(self, words: tuple[str, ...], known: tuple[str, ...]) -> None:
        """No word selects everything. A word that is a family's name selects that family alone."""
        names = {name_of(module) for module in known}
        self._families = {word for word in words if word in names}
        self._parts = tuple(word for word in words if word not in names)

    def family(self, module: str) -> bool:
        """Whether any shape of this family may be wanted."""
        return bool(self._parts) or not self._families or name_of(module) in self._families

    def shape(self, module: str, operator: str, shape: str) -> bool:
        """Whether this shape is wanted."""
        if not self._parts and not self._families:
            return True
        return name_of(module) in self._families or any(part in f"{operator} {shape}" for part in self._parts)
