"""Runs helm on the chart and reads what it renders; knows no rule about the result."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
PRESETS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
OLD, NEW = "1.20.2", "1.37.1"
RELEASE, NAMESPACE = "big", "serving"
SERVICES = {"router": "router_svc", "vision": "vision_svc", "llm": "llm_svc"}

Manifest = dict[str, Any]


class Refused(Exception):
    """helm ended with an error; the message is what it printed."""


@dataclass(frozen=True)
class Helm:
    """One helm binary."""

    binary: Path

    def lint(self, preset: str) -> str:
        """What `helm lint --strict` prints; raises Refused."""
        return self._run("lint", str(CHART), "--strict", "--values", str(values_file(preset)))

    def template(
        self, preset: str, *more: str, version: str = NEW, values: str = "", tmp_path: Path | None = None
    ) -> list[Manifest]:
        """Manifests of a preset. `more` are arguments of helm; `values` is YAML laid over the preset."""
        files = ["--values", str(values_file(preset))]
        if values:
            assert tmp_path is not None, "values need a place for their file"
            (tmp_path / "values.yaml").write_text(values)
            files += ["--values", str(tmp_path / "values.yaml")]
        # A cluster before 1.24 has no native probes, and the chart says so.
        style = ["--set", "probes.style=exec"] if version == OLD else []
        text = self._run(
            "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", version, *files, *style, *more
        )
        return [document for document in yaml.safe_load_all(text) if document]

    def notes(self, preset: str) -> str:
        """What `helm install` would print."""
        return self._run(
            "install",
            RELEASE,
            str(CHART),
            "--dry-run=client",
            "--namespace",
            NAMESPACE,
            "--values",
            str(values_file(preset)),
        ).split("NOTES:")[1]

    def _run(self, *arguments: str) -> str:
        return _output(self.binary, arguments)


@cache
def _output(binary: Path, arguments: tuple[str, ...]) -> str:
    """The chart does not change while tests run, nor does a test's file of values."""
    done = subprocess.run([str(binary), *arguments], check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def values_file(preset: str) -> Path:
    return CHART / "ci" / f"{preset}-values.yaml"


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def component(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def pod_templates(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod that the chart makes, with its component; a LeaderWorkerSet has two, `helm test` one."""
    for manifest in manifests:
        match manifest["kind"]:
            case "Deployment":
                yield component(manifest), manifest["spec"]["template"]
            case "LeaderWorkerSet":
                group = manifest["spec"]["leaderWorkerTemplate"]
                yield component(manifest), group["leaderTemplate"]
                yield component(manifest), group["workerTemplate"]
            case "Pod":
                yield component(manifest), manifest


def service_pods(manifests: Sequence[Manifest]) -> list[tuple[str, Manifest]]:
    """Those of the three services, without `helm test`."""
    return [(name, template) for name, template in pod_templates(manifests) if name in SERVICES]


def container(template: Manifest) -> Manifest:
    (only,) = template["spec"]["containers"]
    return dict(only)


def environment(template: Manifest) -> dict[str, str]:
    """The variables that begin with DAY0_; a name twice is an error."""
    entries = [entry for entry in container(template).get("env", []) if entry["name"].startswith("DAY0_")]
    found = {entry["name"]: entry["value"] for entry in entries}
    assert len(found) == len(entries), "a variable is set twice"
    return found
