"""One wrong byte in the bucket: the new pod is never ready and says why, the old one serves on, helm goes back."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from day0.embedded import embedded_model
from tests.cluster import release
from tests.cluster.bucket import Bucket
from tests.cluster.cluster import CHART, Cluster, CommandFailed

SHARD = "model-00003-of-00005.safetensors"
# helm waits this long for the pod that cannot come; the message is looked for meanwhile.
UPGRADE_SECONDS = 90
QUESTION, ANSWER = "What does the picture show?", "It is a red square."


def test_a_flipped_byte_keeps_the_old_replica_and_names_file_and_tensor(
    cluster: Cluster, bucket: Bucket, installed: str, values: dict[str, Any], tmp_path: Path
) -> None:
    (before,) = cluster.pods("llm")
    first = ask(cluster)
    assert first.strip() == ANSWER
    uri = bucket.put_folder(embedded_model(), "flipped")
    # Past the header, so that the file is well formed and only its sums tell.
    bucket.flip_byte(f"flipped/{SHARD}", (embedded_model() / SHARD).stat().st_size - 1000)
    changed = copy.deepcopy(values)
    changed["model"]["uri"] = uri

    with ThreadPoolExecutor(1) as pool:
        upgrade = pool.submit(
            release.install, cluster, tmp_path, changed, "--rollback-on-failure", "--timeout", f"{UPGRADE_SECONDS}s"
        )
        message, name = _last_words(cluster, before["metadata"]["name"])
        assert SHARD in message and "model.layers." in message, message
        assert SHARD in cluster.kubectl("describe", "pod", name)
        assert not upgrade.done()
        assert ask(cluster) == first
        with pytest.raises(CommandFailed, match=r"rolled back|rollback"):
            upgrade.result()

    (after,) = cluster.pods("llm")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    assert ask(cluster) == first


def ask(cluster: Cluster) -> str:
    """The answer to the chart's own picture, by a forwarded port of the router."""
    with cluster.forwarded(f"service/{release.RELEASE}-router", 50051) as address:
        arguments = ["chat", QUESTION, "--image", str(CHART / "files" / "square.png"), "--target", address, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "day0", *arguments], check=True, capture_output=True, text=True, timeout=120
        )
    return str(json.loads(done.stdout)["text"])


def _last_words(cluster: Cluster, old: str) -> tuple[str, str]:
    """Termination message of the llm pod that is not `old`, which must not be ready, and the pod's name."""
    end = time.monotonic() + UPGRADE_SECONDS
    while time.monotonic() < end:
        for pod in cluster.pods("llm"):
            if pod["metadata"]["name"] == old:
                continue
            for status in pod["status"].get("containerStatuses", []):
                assert not status["ready"]
                for state in (status["state"], status["lastState"]):
                    if "terminated" in state:
                        return str(state["terminated"].get("message", "")), str(pod["metadata"]["name"])
        # The API server is asked again; there is no event to wait for that is not lost in a restart.
        time.sleep(1)
    raise AssertionError(f"no llm pod but {old} has ended within {UPGRADE_SECONDS} s")
