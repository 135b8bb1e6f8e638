"""The Dockerfile has an image for each service, as the chart runs it. Read, not built: there may be no registry."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml

from tests.chart.rendering import CHART, ROOT, Helm, service_pods
from tools.list_requirements import requirements

DOCKERFILE = (ROOT / "Dockerfile").read_text()
TARGETS = {"router": "router_svc", "vision": "vision_svc", "llm": "llm_svc", "llm-cuda": "llm_svc"}


def stages() -> dict[str, str]:
    """Text of each named stage."""
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", DOCKERFILE, flags=re.M)
    return {
        name: f"FROM {base}\n{body}" for base, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def requirements_stage(name: str) -> str:
    """The stage from which a target, or the stage it begins with, copies what is installed."""
    text = stages()[name]
    if found := re.search(r"^COPY --from=(build-\S+) ", text, re.M):
        return found.group(1)
    return requirements_stage(text.split(maxsplit=2)[1])


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
    # The project's own wheel is all that comes without the list, and without anything it requires.
    (own,) = (install for install in installs if "-c /src/constraints.txt" not in install)
    assert "--no-deps" in own and own.endswith("/wheels/day0-*.whl")
    extras = {
        name: set(found.group(1).split())
        for name, text in stages().items()
        if (found := re.search(r"list_requirements\.py /src/pyproject\.toml ([\w ]+) > ", text))
    }
    # Who follows EndpointSlices, as the chart asks by default, needs the client of the cluster's API.
    assert extras == {
        "build-router": {"router", "cluster"},
        "build-engines": {"vision", "llm", "cluster"},
        "build-llm-cuda": {"llm", "cuda", "cluster"},
    }
    assert {name: requirements_stage(name) for name in TARGETS} == {
        "router": "build-router",
        "vision": "build-engines",
        "llm": "build-engines",
        "llm-cuda": "build-llm-cuda",
    }
    assert "torch" not in stages()["build-router"].split("#")[0]
    assert re.search(r"^ARG BASE=\S+:\d+\.\d+-slim$", DOCKERFILE, re.M)


def test_requirements_come_from_pyproject_and_an_unknown_extra_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = requirements(ROOT / "pyproject.toml", ["router"])
    assert set(listed) == {*project["dependencies"], *project["optional-dependencies"]["router"]}
    with pytest.raises(ValueError, match="extras: rooter not in"):
        requirements(ROOT / "pyproject.toml", ["rooter"])


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
