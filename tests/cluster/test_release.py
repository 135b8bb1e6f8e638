"""The life of a release on a running cluster: asked without installing, installed, upgraded, rolled back, removed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import release
from tests.cluster.cluster import CHART, Cluster, CommandFailed

COMPONENTS = ("router", "vision", "llm")


def test_the_api_server_takes_every_manifest(cluster: Cluster, values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(values))
    arguments = ["install", "asked", str(CHART), "--values", str(tmp_path / "values.json"), "--dry-run=server"]
    assert "kind: Deployment" in cluster.helm(*arguments)
    # Admission says no to what is wrong: the answer above is not of helm alone.
    with pytest.raises(CommandFailed, match="nodeSelector"):
        cluster.helm(*arguments, "--set", "llm_svc.nodeSelector.wrong key=1")
    assert cluster.get("deployments", "--selector", "app.kubernetes.io/instance=asked") == []


def test_installs_from_the_bucket_answers_upgrades_rolls_back_and_leaves_nothing(
    cluster: Cluster, installed: str, values: dict[str, Any], tmp_path: Path
) -> None:
    for component in COMPONENTS:
        (pod,) = cluster.pods(component)
        (status,) = pod["status"]["containerStatuses"]
        assert status["ready"] and status["restartCount"] == 0, component
    # One picture, one question, through the router's Service, from a pod of its own.
    tested = cluster.helm("test", installed, "--logs", "--timeout", "120s")
    assert "Succeeded" in tested
    assert "It is a red square." in tested

    changed = copy.deepcopy(values)
    changed["router_svc"]["settings"]["drain_seconds"] = 21
    release.install(cluster, tmp_path, changed)
    assert _drain_seconds(cluster) == "21"
    cluster.helm("rollback", installed, "1", "--wait", "--timeout", release.TIMEOUT)
    assert _drain_seconds(cluster) == str(values["router_svc"]["settings"]["drain_seconds"])

    cluster.helm("uninstall", installed, "--wait", "--timeout", "120s")
    selector = ("--selector", f"app.kubernetes.io/instance={installed}")
    # Pods end within their grace; everything else is gone with the release.
    cluster.kubectl("wait", "pods", *selector, "--for", "delete", "--timeout", "60s")
    kinds = cluster.kubectl("api-resources", "--namespaced", "--verbs", "list", "--output", "name").split()
    left = {kind: cluster.get(kind, *selector) for kind in kinds if not kind.startswith("events")}
    assert [kind for kind, found in left.items() if found] == []


def _drain_seconds(cluster: Cluster) -> str:
    (deployment,) = cluster.get("deployments", "--selector", "app.kubernetes.io/component=router")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return next(entry["value"] for entry in container["env"] if entry["name"] == "DAY0_ROUTER_DRAIN_SECONDS")
