"""Versions of the software a service runs on, for ModelInfo."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions_of(*distributions: str) -> dict[str, str]:
    """Installed version of each distribution; a source tree that is not installed says so."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
