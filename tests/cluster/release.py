"""The chart as the cluster's tests install it: the embedded model from the bucket, on processors, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from day0.embedded import embedded_model
from tests.cluster.bucket import PORT, SECRET, Bucket
from tests.cluster.cluster import CHART, Cluster

RELEASE = "day0"
TIMEOUT = "240s"


def weight_bytes(folder: Path) -> int:
    """Bytes of all weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def values(bucket: Bucket, uri: str, *, registry: str, tag: str, probes: str) -> dict[str, Any]:
    """Values of a release of every service, one replica each."""
    threads = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    service = {
        "replicas": 1,
        "preStopSeconds": 2,
        "settings": {"drain_seconds": 20},
        "extraEnv": threads,
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}},
    }
    engine = {**service, "extraEnv": [*bucket.environment(), *threads]}
    return {
        "model": {"uri": uri, "weightBytes": weight_bytes(embedded_model()), "credentialsSecret": SECRET},
        "images": {"registry": registry, "tag": tag},
        "probes": {"style": probes},
        "networkPolicy": {"store": {"ports": [PORT]}},
        "router_svc": service,
        "vision_svc": engine,
        "llm_svc": {**engine, "sharedMemory": "64Mi"},
    }


def install(cluster: Cluster, folder: Path, wanted: dict[str, Any], *more: str) -> str:
    """Install or upgrade RELEASE and wait until every pod is ready; what helm printed. Raises CommandFailed."""
    file = folder / "values.json"
    file.write_text(json.dumps(wanted))
    return cluster.helm(
        "upgrade", RELEASE, str(CHART), "--install", "--wait", "--timeout", TIMEOUT, "--values", str(file), *more
    )
