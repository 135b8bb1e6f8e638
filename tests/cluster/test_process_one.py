"""The router's image as process 1 of a container, for which the kernel ignores signals without a handler."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.cluster.cluster import Cluster

PROBE = ["python", "-m", "svc_common.health_probe", "--service", ""]
KILL = "import os, signal, time; print(time.time()); os.kill(1, signal.SIGTERM)"
# One second of ours, and the kubelet's times are whole seconds.
MAX_SECONDS = 2.0


def test_sigterm_ends_the_router_with_status_zero(cluster: Cluster, values: dict[str, Any]) -> None:
    name = "process-one-router"
    images = values["images"]
    container = {
        "name": "router",
        "image": f"{images['registry']}/day0-router:{images['tag']}",
        "env": [{"name": "DAY0_ROUTER_LLM_TARGETS", "value": "127.0.0.1:1"}],
        "readinessProbe": {
            "exec": {"command": PROBE},
            "periodSeconds": 1,
            "timeoutSeconds": 10,
            "failureThreshold": 60,
        },
    }
    spec = {"restartPolicy": "Never", "enableServiceLinks": False, "containers": [container]}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    try:
        cluster.kubectl("wait", f"pod/{name}", "--for", "condition=Ready", "--timeout", "60s")
        sent = float(cluster.kubectl("exec", name, "--", "python", "-c", KILL))
        cluster.kubectl("wait", f"pod/{name}", "--for", "jsonpath={.status.phase}=Succeeded", "--timeout", "30s")
        (pod,) = (pod for pod in cluster.get("pods") if pod["metadata"]["name"] == name)
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        assert ended["exitCode"] == 0
        assert datetime.fromisoformat(ended["finishedAt"]).timestamp() - sent < MAX_SECONDS
    finally:
        cluster.kubectl("delete", "pod", name, "--grace-period", "1")
