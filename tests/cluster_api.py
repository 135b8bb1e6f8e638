"""A cluster's API server as far as EndpointSlices go, on loopback: lists, watches, refusals; it checks the token."""

from __future__ import annotations

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-token"


def endpoint_slice(name: str, *addresses: str, port: int, terminating: tuple[str, ...] = ()) -> dict[str, Any]:
    """One slice of the Service `llm`; `terminating` are addresses of pods that end."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "llm"}},
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": False, "terminating": address in terminating}}
            for address in addresses
        ],
    }


class ClusterApi:
    """`put` and `delete` change slices and tell every watch; a `status` other than 200 answers every list."""

    def __init__(self, *, versions: tuple[str, ...] = ("v1",)) -> None:
        self.status = 200
        self.token = TOKEN
        self.lists = self.refusals = 0
        self.watched_from: list[int] = []
        self._versions = versions
        self._slices: dict[str, dict[str, Any]] = {}
        self._revision = 1
        self._watchers: list[queue.Queue[dict[str, Any] | None]] = []
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                api._answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.end_watches()
        self._server.shutdown()
        self._server.server_close()

    def put(self, item: dict[str, Any]) -> None:
        with self._lock:
            self._revision += 1
            name = item["metadata"]["name"]
            kind = "MODIFIED" if name in self._slices else "ADDED"
            item["metadata"]["resourceVersion"] = str(self._revision)
            self._slices[name] = item
            self._tell({"type": kind, "object": item})

    def delete(self, name: str) -> None:
        with self._lock:
            self._revision += 1
            item = self._slices.pop(name)
            item["metadata"]["resourceVersion"] = str(self._revision)
            self._tell({"type": "DELETED", "object": item})

    def expire(self) -> None:
        """Tells every watch that its version is too old, and ends it."""
        with self._lock:
            self._tell({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Gone", "message": "old"}})
        self.end_watches()

    def end_watches(self) -> None:
        with self._lock:
            for watcher in self._watchers:
                watcher.put(None)
            self._watchers.clear()

    def _tell(self, event: dict[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.put(event)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        paths = {f"/apis/discovery.k8s.io/{version}/namespaces/day0/endpointslices" for version in self._versions}
        if url.path not in paths:
            return self._send(request, 404, {"reason": "NotFound"})
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return self._send(request, 401, {"reason": "Unauthorized"})
        if self.status != 200:
            self.refusals += 1
            return self._send(request, self.status, {"reason": "refused"})
        assert query["labelSelector"] == "kubernetes.io/service-name=llm"
        if query.get("watch", "").lower() != "true":
            with self._lock:
                self.lists += 1
                body = {"items": list(self._slices.values()), "metadata": {"resourceVersion": str(self._revision)}}
            return self._send(request, 200, body)
        watcher: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._lock:
            self.watched_from.append(int(query["resourceVersion"]))
            for item in self._slices.values():
                if int(item["metadata"]["resourceVersion"]) > int(query["resourceVersion"]):
                    watcher.put({"type": "MODIFIED", "object": item})
            self._watchers.append(watcher)
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        while (event := watcher.get()) is not None:
            line = json.dumps(event).encode() + b"\n"
            request.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            request.wfile.flush()
        request.wfile.write(b"0\r\n\r\n")

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)
