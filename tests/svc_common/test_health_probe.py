"""The probe's exit status says what the health port says, and that nobody answers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from svc_common.health import Health
from svc_common.health_probe import main

SERVICE = "day0.llm.v1.LanguageService"


@pytest.fixture
def health() -> Iterator[Health]:
    health = Health()
    health.set_serving(SERVICE, False)
    health.start()
    yield health
    health.stop()


def test_follows_readiness(health: Health, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--port", str(health.port), "--service", SERVICE]
    assert main(command) == 1
    assert capsys.readouterr().out == f"{SERVICE}: NOT_SERVING\n"
    health.set_serving(SERVICE, True)
    assert main(command) == 0
    health.start_draining()
    assert main(command) == 1


def test_liveness_is_the_empty_name(health: Health) -> None:
    assert main(["--port", str(health.port)]) == 0
    health.set_liveness(lambda: False)
    assert main(["--port", str(health.port)]) == 1


def test_an_unknown_service_is_no_success(health: Health, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", str(health.port), "--service", "day0.llm.v1.Other"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().out


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Bound, not listening.
        assert main(["--port", str(taken.getsockname()[1]), "--timeout-seconds", "2"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().out


def test_as_the_chart_runs_it(health: Health) -> None:
    command = [sys.executable, "-m", "svc_common.health_probe", "--port", str(health.port), "--service", ""]
    environment = {"PYTHONPATH": ":".join(sys.path), "http_proxy": "http://127.0.0.1:1"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "liveness: SERVING\n")
