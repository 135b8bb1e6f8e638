"""A cluster by its kubeconfig: kubectl, helm and forwarded ports; knows neither the chart nor which cluster it is."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHART = Path(__file__).resolve().parents[2] / "helm"


class CommandFailed(RuntimeError):
    """kubectl or helm ended with an error; the message is what was run and what it printed."""


@dataclass(frozen=True)
class Cluster:
    """One cluster and one namespace of it; `helm_binary` is helm 4."""

    kubeconfig: Path
    namespace: str
    kubectl_binary: Path
    helm_binary: Path

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120) -> str:
        """What kubectl prints, in the namespace. Raises CommandFailed."""
        return self._run([str(self.kubectl_binary), *self._place(), *arguments], stdin, timeout_seconds)

    def helm(self, *arguments: str, timeout_seconds: float = 600) -> str:
        """What helm prints, in the namespace. Raises CommandFailed."""
        return self._run([str(self.helm_binary), *self._place(), *arguments], None, timeout_seconds)

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Creates or changes objects."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))

    def get(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        """Objects of a kind in the namespace; arguments as of `kubectl get`, a selector for instance."""
        return list(json.loads(self.kubectl("get", kind, *arguments, "--output", "json"))["items"])

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Pods of a component of the chart, without those that are ending."""
        found = self.get("pods", "--selector", f"app.kubernetes.io/component={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def logs(self, pod: str, *arguments: str) -> str:
        """What its container printed."""
        return self.kubectl("logs", pod, *arguments)

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """`127.0.0.1:PORT` that leads to one pod of the target, `service/NAME` or `pod/NAME`, while in the block."""
        command = [str(self.kubectl_binary), *self._place(), "port-forward", target, f":{port}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"(127\.0\.0\.1:\d+) ->", line)
            if not found:
                raise CommandFailed(f"{' '.join(command)}: {line}{process.stdout.read()}")
            # Each connection prints a line; a full pipe would stop the forwarding.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield found.group(1)
        finally:
            process.terminate()
            process.wait(timeout=10)

    def _place(self) -> list[str]:
        return ["--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace]

    def _run(self, command: list[str], stdin: str | None, timeout_seconds: float) -> str:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, input=stdin, timeout=timeout_seconds
        )
        if done.returncode:
            raise CommandFailed(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout
