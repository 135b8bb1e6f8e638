"""Services that are still reading their weights: what each of their ports says then, and how they end by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.channel import open_channel
from svc_common.errors import error_from_rpc
from tests.s3_double import BUCKET, PREFIX, S3Double
from tests.services.conftest import ENVIRONMENT, ROOT
from tests.services.store import environment_of, filled

URI = f"s3://{BUCKET}/{PREFIX}"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PROMPTLY_SECONDS = 15


@dataclass(frozen=True)
class Kind:
    """One of the two services that load weights, and how it is called."""

    name: str
    full_name: str
    stub: Any
    info: Any
    work: str
    request: Any
    """A call that needs the model."""


KINDS = [
    Kind(
        "llm",
        "day0.llm.v1.LanguageService",
        llm_pb2_grpc.LanguageServiceStub,
        llm_pb2.GetModelInfoRequest,
        "Generate",
        llm_pb2.GenerateRequest(),
    ),
    Kind(
        "vision",
        "day0.vision.v1.VisionService",
        vision_pb2_grpc.VisionServiceStub,
        vision_pb2.GetModelInfoRequest,
        "Encode",
        vision_pb2.EncodeRequest(),
    ),
]


@pytest.fixture
def double(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[S3Double]:
    """The tiny checkpoint, of whose weights only the beginning of each file comes."""
    double = filled(Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")))
    double.act_of = lambda name, start: "withhold" if name.endswith(".safetensors") and start > 100_000 else None
    yield double
    double.stop()


@asynccontextmanager
async def process(name: str, double: S3Double, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    folder.mkdir()
    settings = {"MODEL": URI, "GRPC_PORT": "0", "HEALTH_PORT": "0", "METRICS_PORT": "0", "LOAD_BUDGET_BYTES": "60000"}
    environ = {**ENVIRONMENT, **environment_of(double), "TMPDIR": str(folder)}
    environ |= {f"DAY0_{name.upper()}_{key}": value for key, value in settings.items()}
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"{name}_svc", cwd=ROOT, env=environ, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(180):
            yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def listening(started: asyncio.subprocess.Process) -> dict[str, Any]:
    """The line of the log that tells the ports."""
    assert started.stderr is not None
    async for line in started.stderr:
        if line.startswith(b"{") and "grpc_port" in (fields := json.loads(line)):
            return fields
    raise AssertionError("the process ended before it listened")


async def standing_still(ask: Callable[[], Awaitable[Any]]) -> Any:
    """An answer of GetModelInfo with bytes in it that the one before it had too: what was on its way has landed."""
    before = -1
    while not before == (answer := await ask()).startup.loaded_bytes > 0:
        before = answer.startup.loaded_bytes
        await asyncio.sleep(0.2)
    return answer


def fetched(folder: Path) -> list[Path]:
    """Temporary folders of checkpoints."""
    return list(folder.glob("day0-*"))


def heirs(folder: Path) -> list[psutil.Process]:
    """Processes that have the service's environment: itself and its children."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


def metrics_of(pid: int, *others: int) -> dict[str, float]:
    """Metrics of a process whose other two ports are known."""
    ports = {found.laddr.port for found in psutil.Process(pid).net_connections() if found.status == "LISTEN"}
    (port,) = ports - set(others)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_in_mid_load_all_ports_tell_so_and_a_signal_ends_it(kind: Kind, double: S3Double, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    async with process(kind.name, double, temporary) as started:
        ports = await listening(started)
        async with (
            open_channel(f"127.0.0.1:{ports['grpc_port']}") as channel,
            open_channel(f"127.0.0.1:{ports['health_port']}") as health_channel,
        ):
            stub, health = kind.stub(channel), health_pb2_grpc.HealthStub(health_channel)
            early = await stub.GetModelInfo(kind.info())
            assert early.startup.stage in ("resolve", "manifest", "load") and not early.HasField("info")
            assert await asyncio.to_thread(double.withheld.wait, 30)
            answer = await standing_still(lambda: stub.GetModelInfo(kind.info()))
            told = answer.startup
            assert told.stage == "load" and 0 < told.loaded_bytes < told.expected_bytes
            assert told.HasField("seconds_left") == (told.bytes_per_second > 0)
            assert told.elapsed_seconds > early.startup.elapsed_seconds
            assert not answer.HasField("info")
            for service, right in (("", SERVING), (kind.full_name, NOT_SERVING)):
                assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == right
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in getattr(stub, kind.work)(kind.request):
                    pass
            refused = error_from_rpc(caught.value)
            percent = 100 * told.loaded_bytes // told.expected_bytes
            assert refused.reason == "LOADING"
            assert f"stage load, {percent} % of {told.expected_bytes} bytes" in refused.message
            metrics = await asyncio.to_thread(metrics_of, started.pid, ports["grpc_port"], ports["health_port"])
            assert metrics["day0_weight_load_bytes"] == told.loaded_bytes
            assert metrics["day0_weight_load_expected_bytes"] == told.expected_bytes
            assert metrics['day0_startup_stage{stage="load"}'] == 1
        assert fetched(temporary), "nothing was fetched; the test would not see what is left behind"
        assert double.connections > 0 and heirs(temporary)
        began = time.monotonic()
        started.send_signal(signal.SIGTERM)
        await started.communicate()
        await started.communicate()
        assert time.monotonic() - began < PROMPTLY_SECONDS
    assert started.returncode == 0
    assert not fetched(temporary)
    assert not heirs(temporary)
    async with asyncio.timeout(PROMPTLY_SECONDS):
        while double.connections:
            await asyncio.sleep(0.02)
