"""Everything that can go wrong between a bucket and a service, each once through both services: its status and log."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

import llm_svc.__main__
import vision_svc.__main__
from day0.plan import FULL_NAMES, free_ports
from svc_common.checkpoint import INDEX_NAME
from svc_common.safetensors_header import LENGTH_BYTES
from tests.s3_double import BUCKET, PREFIX, S3Double
from tests.services.store import environment_of, filled

SERVING = health_pb2.HealthCheckResponse.SERVING
MAIN = {"llm": llm_svc.__main__.main, "vision": vision_svc.__main__.main}
QUICK_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100)]


@dataclass(frozen=True)
class Run:
    """How a service ended, the readiness that it had, and what it logged."""

    status: int
    readiness: list[int]
    log: list[dict[str, object]]

    @property
    def stages(self) -> list[str]:
        said = [str(line["message"]) for line in self.log]
        return [message.removeprefix("startup stage: ") for message in said if message.startswith("startup stage: ")]

    @property
    def sent_again(self) -> list[object]:
        return [line["cause"] for line in self.log if line["message"] == "a request to the store is sent again"]

    @property
    def errors(self) -> str:
        return "\n".join(str(line["message"]) for line in self.log if line["level"] == "error")


class Runner:
    """Runs a service's own `main` in this process, and tells it to end once it is ready."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._capsys = capsys

    def __call__(self, name: str, double: S3Double, token: str = "") -> Run:
        (health_port,) = free_ports("127.0.0.1", 1)
        settings = {
            "MODEL": f"s3://{BUCKET}/{PREFIX}",
            "REQUIRE_MANIFEST": "true",
            "LOAD_BUDGET_BYTES": "100000",
            "GRPC_PORT": "0",
            "HEALTH_PORT": str(health_port),
            "METRICS_PORT": "0",
        }
        variables = {f"DAY0_{name.upper()}_{key}": value for key, value in settings.items()}
        for key, value in {**variables, **environment_of(double, token)}.items():
            self._patch.setenv(key, value)
        readiness: list[int] = []
        with grpc.insecure_channel(f"127.0.0.1:{health_port}", options=QUICK_RECONNECT) as channel:
            request = health_pb2.HealthCheckRequest(service=FULL_NAMES[name])
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
            watcher = threading.Thread(target=self._end_when_ready, args=(watch, readiness))
            watcher.start()
            status = MAIN[name]()
            watch.cancel()
            watcher.join()
        lines = self._capsys.readouterr().err.splitlines()
        return Run(status, readiness, [json.loads(line) for line in lines if line.startswith("{")])

    @staticmethod
    def _end_when_ready(watch: Iterator[health_pb2.HealthCheckResponse], readiness: list[int]) -> None:
        try:
            for answer in watch:
                readiness.append(answer.status)
                if answer.status == SERVING:
                    os.kill(os.getpid(), signal.SIGTERM)
        except grpc.RpcError:
            # The service has ended, or the watch was cancelled because it did.
            pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Runner]:
    root, threads = logging.getLogger(), torch.get_num_threads()
    handlers, level = list(root.handlers), root.level
    yield Runner(monkeypatch, capsys)
    root.handlers[:], root.level = handlers, level
    torch.set_num_threads(threads)


@pytest.fixture
def double(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[S3Double]:
    double = filled(Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")))
    yield double
    double.stop()


def tensor_of(name: str, double: S3Double) -> tuple[str, str]:
    """A tensor that only this service reads, and its file."""
    owners = json.loads(double.objects[INDEX_NAME])["weight_map"]
    found = sorted(tensor for tensor in owners if tensor.startswith("model.visual.") == (name == "vision"))
    return found[-1], owners[found[-1]]


def at_first_weights(double: S3Double, file: str, act: Callable[[], str | None]) -> None:
    """Asks `act` what to do with the first range of a file that lies behind its header."""
    done = threading.Event()

    def act_of(name: str, start: int) -> str | None:
        if name != file or not start or done.is_set():
            return None
        done.set()
        return act()

    double.act_of = act_of


@pytest.mark.parametrize("name", ["llm", "vision"])
def test_passing_trouble_ends_in_ready(
    name: str, double: S3Double, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 twice, a cut body, a short partial answer, and a session that expires while the weights are read."""
    _, file = tensor_of(name, double)

    def trouble() -> None:
        double.script.extend(["slow", "slow", "cut", "short"])
        # The new token is where the old one was: a file or a metadata service would have it too.
        monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
        double.expired_tokens.add("old")

    at_first_weights(double, file, trouble)
    ended = run(name, double, token="old")
    assert (ended.status, ended.errors) == (0, "")
    assert SERVING in ended.readiness
    assert ended.stages == ["manifest", "load", "verify", "warm_up", "ready"]
    assert not double.script, "the faults did not all happen"
    assert sorted(map(str, ended.sent_again)) == [
        "the body was cut off",
        "the partial answer has the wrong length or range",
        "the store is throttling",
        "the store is throttling",
    ]
    assert [line["message"] for line in ended.log if "expired" in str(line["message"])] == [
        "the store says that the credentials have expired; they are refreshed"
    ]


def ignores_ranges(double: S3Double, file: str, tensor: str) -> None:
    at_first_weights(double, file, lambda: "whole")


def is_replaced(double: S3Double, file: str, tensor: str) -> None:
    """Between the request for the header and the first one for weights."""

    def replaced() -> None:
        double.etags[file] = '"another"'

    at_first_weights(double, file, replaced)


def loses_a_shard(double: S3Double, file: str, tensor: str) -> None:
    del double.objects[file]


def lets_credentials_expire(double: S3Double, file: str, tensor: str) -> None:
    at_first_weights(double, file, lambda: double.expired_tokens.add("old"))


def flips_a_header(double: S3Double, file: str, tensor: str) -> None:
    # Inside a name, so that it is still JSON.
    flip(double, file, double.objects[file].index(tensor.encode()) + 1)


def flips_a_tensor(double: S3Double, file: str, tensor: str) -> None:
    content = double.objects[file]
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    flip(double, file, end + json.loads(content[LENGTH_BYTES:end])[tensor]["data_offsets"][1] - 1)


def flips_the_index(double: S3Double, file: str, tensor: str) -> None:
    flip(double, INDEX_NAME, double.objects[INDEX_NAME].index(tensor.encode()) + 1)


def flip(double: S3Double, name: str, place: int) -> None:
    content = bytearray(double.objects[name])
    content[place] ^= 1
    double.objects[name] = bytes(content)


@pytest.mark.parametrize("name", ["llm", "vision"])
@pytest.mark.parametrize(
    ("damage", "says", "last_stage"),
    [
        (ignores_ranges, "{file} in s3://models/tiny: the store ignored the range of the request", "load"),
        (is_replaced, "{file} in s3://models/tiny: the file changed while it was being read", "load"),
        (loses_a_shard, "weight files are missing: {file}", "manifest"),
        (lets_credentials_expire, "{file} in s3://models/tiny: the credentials have expired", "load"),
        (flips_a_header, "{file}: wrong bytes: sha256 of the header", "manifest"),
        (flips_a_tensor, "{file}: tensor '{tensor}': wrong bytes: sha256 of the tensor", "load"),
        (flips_the_index, f"{INDEX_NAME}: wrong bytes: sha256 of the file", "manifest"),
    ],
    ids=lambda part: part.__name__ if callable(part) else None,
)
def test_what_is_wrong_is_never_ready(
    name: str,
    damage: Callable[[S3Double, str, str], None],
    says: str,
    last_stage: str,
    double: S3Double,
    run: Runner,
) -> None:
    tensor, file = tensor_of(name, double)
    damage(double, file, tensor)
    ended = run(name, double, token="old")
    assert ended.status == 1
    assert SERVING not in ended.readiness and "ready" not in ended.stages
    assert ended.stages[-1] == "failed"
    assert ended.stages[-2] in (last_stage, "verify")
    assert says.format(file=file, tensor=tensor) in ended.errors
