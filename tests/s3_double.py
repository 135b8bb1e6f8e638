"""S3 on loopback for tests: a store whose faults are scripted, and moto's server in a process of its own."""

from __future__ import annotations

import http.server
import os
import re
import select
import subprocess
import sys
import threading
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "models"
PREFIX = "tiny"


class S3Double:
    """Objects by name under s3://models/tiny. Each ranged GET takes the next word of `script`, "ok" when it is empty.

    "replace" serves the request and then changes the object's ETag; `honours_if_match` tells whether a later If-Match
    is refused or ignored, and `if_matches` has it for each ranged GET. Tokens in `expired_tokens` are answered with
    ExpiredToken. `at_request` is called with the number of each GET. `act_of(name, start)` may give a range its word in
    place of the script. "withhold" sends the headers, sets `withheld`, and sends no body until `release` is set.
    `connections` is how many are open.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.script: deque[str] = deque()
        self.expired_tokens: set[str] = set()
        self.honours_if_match = True
        self.requests: list[tuple[str, str, str | None]] = []
        self.if_matches: list[str | None] = []
        self.at_request: Callable[[int], None] = lambda number: None
        self.act_of: Callable[[str, int], str | None] = lambda name, start: None
        self.withheld = threading.Event()
        self.release = threading.Event()
        self.connections = 0
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"double": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def config(self, token: str = "") -> dict[str, Any]:
        return config_of(self.endpoint, token)

    def put(self, name: str, content: bytes) -> None:
        self.objects[name] = content
        self.etags[name] = f'"{name}-1"'

    def ranges(self, name: str) -> list[str]:
        """Range headers of the GETs of one object, in order."""
        return [found for method, path, found in self.requests if method == "GET" and path == name and found]

    def stop(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


def config_of(endpoint: str, token: str = "") -> dict[str, Any]:
    """Settings of obstore for a store on loopback."""
    config = {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    return {**config, "allow_http": True, **({"session_token": token} if token else {})}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    double: S3Double

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        with self.double.lock:
            self.double.connections += 1

    def finish(self) -> None:
        with self.double.lock:
            self.double.connections -= 1
        super().finish()

    def do_GET(self) -> None:
        double = self.double
        url = urlsplit(self.path)
        name = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix(f"/{PREFIX}/").strip("/")
        wanted = self.headers.get("Range")
        with double.lock:
            double.requests.append(("GET", name, wanted))
            if wanted:
                double.if_matches.append(self.headers.get("If-Match"))
            number = len(double.requests)
            act = double.act_of(name, int(wanted[6:].split("-")[0])) if wanted else None
            expired = self.headers.get("x-amz-security-token") in double.expired_tokens
            if act is None:
                act = double.script.popleft() if wanted and double.script and not expired else "ok"
        double.at_request(number)
        if expired:
            self._error(403, "ExpiredToken")
        elif "list-type" in parse_qs(url.query):
            self._list()
        elif name not in double.objects:
            self._error(404, "NoSuchKey")
        elif double.honours_if_match and self.headers.get("If-Match", double.etags[name]) != double.etags[name]:
            self._error(412, "PreconditionFailed")
        else:
            self._object(name, wanted, act)

    def do_PUT(self) -> None:
        name = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/{PREFIX}/")
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with self.double.lock:
            self.double.requests.append(("PUT", name, None))
            self.double.put(name, content)
        self._answer(200, b"", {"ETag": self.double.etags[name]})

    def _object(self, name: str, wanted: str | None, act: str) -> None:
        content, etag = self.double.objects[name], self.double.etags[name]
        begin, last = 0, len(content) - 1
        if wanted:
            begin, last = (int(part) for part in re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())  # type: ignore[union-attr]
        part = content[begin : last + 1]
        headers = {"ETag": etag, "Content-Range": f"bytes {begin}-{last}/{len(content)}"}
        match act:
            case "withhold":
                self._answer(206, b"", headers, length=len(part))
                self._await_release_or_end()
                self.wfile.write(part)
            case "ok":
                self._answer(206 if wanted else 200, part, headers)
            case "replace":
                self.double.etags[name] = f'"{name}-2"'
                self._answer(206, part, headers)
            case "slow":
                self._error(503, "SlowDown")
            case "fault":
                self._error(500, "InternalError")
            case "denied":
                self._error(403, "AccessDenied")
            case "cut":
                self._answer(206, part[: len(part) // 2], headers, length=len(part))
                self.close_connection = True
            case "short":
                self._answer(206, part[:-1], headers)
            case "short_range":
                self._answer(206, part[:-1], {**headers, "Content-Range": f"bytes {begin}-{last - 1}/{len(content)}"})
            case "whole":
                self._answer(200, content, {"ETag": etag})
            case "reset":
                self.close_connection = True
            case _:
                raise AssertionError(act)

    def _await_release_or_end(self) -> None:
        """Returns when the body may go, and also when the other side has closed the connection."""
        self.double.withheld.set()
        while not self.double.release.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.05)
            if readable:
                return

    def _list(self) -> None:
        entries = "".join(
            f"<Contents><Key>{escape(f'{PREFIX}/{name}')}</Key><LastModified>2026-11-02T10:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.double.etags[name])}</ETag><Size>{len(content)}</Size></Contents>"
            for name, content in sorted(self.double.objects.items())
        )
        document = (
            f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        )
        self._answer(200, document.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        secret = "<Token-0>top-secret-token</Token-0>"
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message>{secret}</Error>"
        self._answer(status, body.encode(), {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def moto() -> Iterator[str]:
    """Endpoint of a moto S3 server with the empty bucket `models`."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        found = next(match for line in process.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        endpoint = found.group()
        # Nobody reads the log; a full pipe would stop the server.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        create = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(create, timeout=30) as answer:
            assert answer.status == 200
        yield endpoint
    finally:
        process.terminate()
        process.wait(timeout=30)
