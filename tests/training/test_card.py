"""The pages about the embedded model say what the figures say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from day0.embedded import embedded_model
from training.demo.card import BENCH_PAGE, FIGURES, fill
from training.demo.faults import FAULTS


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(FIGURES.read_text())
    return document


@pytest.mark.parametrize("page", [BENCH_PAGE, embedded_model() / "README.md"], ids=["bench", "card"])
def test_tables_are_those_of_the_figures(page: Path, figures: dict[str, Any]) -> None:
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end -->") == 4
    assert fill(text, figures) == text


def test_only_marked_places_are_renewed(figures: dict[str, Any]) -> None:
    filled = fill("before\n<!-- table: faults -->\nold\n<!-- end -->\nafter\n", figures)
    assert filled.startswith("before\n<!-- table: faults -->\n| fault |")
    assert filled.endswith("|\n<!-- end -->\nafter\n") and "\nold\n" not in filled


def test_every_fault_was_measured_and_seen(figures: dict[str, Any]) -> None:
    measured = figures["faults"]["faults"]
    assert set(measured) == set(FAULTS)
    for name, fault in measured.items():
        assert max(fault["differences"].values()) > figures["faults"]["tolerance"], name
