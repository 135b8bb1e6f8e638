"""The Dockerfile has an image for each service, as the chart runs it. Read, not built: there may be no registry."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.chart.rendering import CHART, ROOT, Helm, service_pods

DOCKERFILE = (ROOT / "Dockerfile").read_text()
TARGETS = {"router": "router_svc", "vision": "vision_svc", "llm": "llm_svc", "llm-cuda": "llm_svc"}


def stages() -> dict[str, str]:
    """Text of each named stage."""
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", DOCKERFILE, flags=re.M)
    return {
        name: f"FROM {base}\n{body}" for base, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


@pytest.mark.parametrize(("target", "package"), TARGETS.items())
def test_target_runs_its_service_as_the_charts_user(helm: Helm, target: str, package: str) -> None:
    stage = stages()[target]
    (command,) = re.findall(r"^CMD (.*)$", stage, re.M)
    # Exec form: a shell as process 1 would keep SIGTERM to itself.
    assert json.loads(command) == ["python", "-m", package]
    (user,) = re.findall(r"^USER (\d+):(\d+)$", stage, re.M)
    security = service_pods(helm.template("cpu"))[0][1]["spec"]["securityContext"]
    assert user == (str(security["runAsUser"]), str(security["runAsGroup"]))
    assert "ENTRYPOINT" not in DOCKERFILE
    assert re.findall(r"^EXPOSE (.*)$", stage, re.M) == ["50051 50052 9090"]


def test_installs_are_pinned_and_each_image_has_the_extras_it_needs() -> None:
    installs = re.findall(r"pip install (?:[^\n]*\\\n)*[^\n]*", DOCKERFILE)
    assert len(installs) == 5
    assert all("-c /src/constraints.txt" in install for install in installs)
    extras = {
        name: set(found.group(1).split(","))
        for name, text in stages().items()
        if (found := re.search(r"day0-\*\.whl\)\[([\w,]+)\]", text))
    }
    # Who follows EndpointSlices, as the chart asks by default, needs the client of the cluster's API.
    assert extras == {
        "build-router": {"router", "cluster"},
        "build-vision": {"vision"},
        "build-llm": {"llm", "cluster"},
        "build-llm-cuda": {"llm", "cuda", "cluster"},
    }
    assert "torch" not in stages()["build-router"].split("#")[0]
    assert re.search(r"^ARG BASE=\S+:\d+\.\d+-slim$", DOCKERFILE, re.M)


def test_copied_paths_exist_and_are_in_the_context() -> None:
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    copied = {path for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M) for path in line.split()}
    assert copied == kept
    assert all((ROOT / path).exists() for path in copied)


def test_presets_name_images_that_are_targets() -> None:
    files = [CHART / "values.yaml", *(CHART / "ci").glob("*-values.yaml")]
    for path in files:
        values = yaml.safe_load(path.read_text())
        for service in ("router_svc", "vision_svc", "llm_svc"):
            name = values.get(service, {}).get("image", {}).get("repository")
            assert name is None or name.removeprefix("day0-") in TARGETS
