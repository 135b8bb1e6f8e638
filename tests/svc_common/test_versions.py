"""Versions are those installed."""

from __future__ import annotations

from importlib.metadata import version

from svc_common.versions import versions_of


def test_versions_are_those_installed() -> None:
    assert versions_of("grpcio", "no-such-distribution") == {
        "grpcio": version("grpcio"),
        "no-such-distribution": "not installed",
    }
