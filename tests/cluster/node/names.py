"""The node's names: writes Services' names and addresses for dnsmasq; knows nothing of pods' own names.

No CoreDNS image can be had without a registry. Follows the API server by asking twice a second: two small answers.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ADDRESS = "https://127.0.0.1:6443/api/v1"
PERIOD_SECONDS = 0.5


def items(context: ssl.SSLContext, kind: str) -> list[dict[str, Any]]:
    """All objects of a kind, of all namespaces."""
    with urllib.request.urlopen(f"{ADDRESS}/{kind}", context=context, timeout=5) as answer:
        return list(json.load(answer)["items"])


def hosts(services: list[dict[str, Any]], endpoints: list[dict[str, Any]]) -> str:
    """Lines of a hosts file: a Service's own address, or those of its ready pods where it is headless."""
    ready = {
        (found["metadata"]["namespace"], found["metadata"]["name"]): [
            address["ip"] for subset in found.get("subsets") or [] for address in subset.get("addresses") or []
        ]
        for found in endpoints
    }
    lines = []
    for service in services:
        namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
        own = service["spec"].get("clusterIP")
        addresses = [own] if own and own != "None" else ready.get((namespace, name), [])
        lines += [f"{address} {name}.{namespace}.svc.cluster.local" for address in addresses]
    return "".join(f"{line}\n" for line in sorted(lines))


def main(run: Path, dnsmasq: int) -> None:
    """Until the process is ended."""
    context = ssl.create_default_context(cafile=str(run / "pki/ca.crt"))
    context.load_cert_chain(run / "pki/admin.crt", run / "pki/admin.key")
    written = ""
    while True:
        try:
            text = hosts(items(context, "services"), items(context, "endpoints"))
        except OSError as error:
            print(error, flush=True)
            text = written
        if text != written:
            (run / "hosts.new").write_text(text)
            (run / "hosts.new").replace(run / "hosts.txt")
            os.kill(dnsmasq, signal.SIGHUP)
            written = text
        time.sleep(PERIOD_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
