"""`day0 demo-eval` and `day0 serve` without a model, through real services."""

from __future__ import annotations

import json

import pytest

from day0.cli import run
from tests.day0.test_serve import ask, serving
from tests.services.conftest import ENVIRONMENT


@pytest.mark.slow
def test_served_without_a_model_it_reaches_its_marks(capfd: pytest.CaptureFixture[str]) -> None:
    tasks = ("shapes", "numbers", "two_pictures", "facts", "sums")
    with serving() as (_, services):
        target = services["router"]["target"]
        assert ask(target, "What is 2 plus 3?", "--model", "day0-demo")["text"].strip() == "The sum is 5."
        chosen = [part for task in tasks for part in ("--task", task)]
        assert run(["demo-eval", "--target", target, "--limit", "2", "--json", *chosen], {}) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["model"] == "day0-demo"
    assert [(task["name"], task["right"], task["asked"]) for task in document["tasks"]] == [(t, 2, 2) for t in tasks]


@pytest.mark.slow
def test_without_a_target_it_starts_the_services_itself(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo-eval", "--limit", "2", "--task", "sums", "--json"], ENVIRONMENT) == 0
    assert json.loads(capfd.readouterr().out)["tasks"][0]["reached"] is True
