"""A service whose checkpoint is in an object store, and one that trusts no byte without a manifest."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.vision.v1 import vision_pb2
from svc_common.channel import open_channel
from svc_common.digests import make_manifest
from svc_common.manifest import write_manifest
from svc_common.object_store import ObjectStore
from svc_common.startup import StartupStopped
from tests.checkpoints import flip
from tests.s3_double import BUCKET, PREFIX, moto
from tests.vision_svc.checkpoints import opened, vision_files
from tests.vision_svc.client import Client, ServeVision, noise
from vision_svc.server import SERVICE_NAME
from vision_svc.weights import WeightsError

URI = f"s3://{BUCKET}/{PREFIX}"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def remote(endpoint: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The tiny checkpoint in a store that only the environment describes."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = ObjectStore(URI)
    for file in tiny_checkpoint.iterdir():
        store.write(file.name, file.read_bytes())
    return store


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def stages(client: Client) -> list[str]:
    return re.findall(r'day0_startup_stage\{stage="(\w+)"\} 1\.0', client.launcher.metrics.text())


async def ready(client: Client) -> bool:
    async with open_channel(f"127.0.0.1:{client.launcher.health.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_tokens_from_a_store_are_those_from_the_folder(
    remote: ObjectStore, serve_vision: ServeVision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(remote, make_manifest(remote))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    there = await serve_vision(model=URI, require_manifest=True, load_budget_bytes=100_000)
    assert not list(tmp_path.iterdir()), "what was fetched is still there"
    here = await serve_vision()
    for picture in (noise(1), noise(2, (300, 180))):
        assert (await there.encode(picture)).data == (await here.encode(picture)).data
    infos = [(await each.stub.GetModelInfo(vision_pb2.GetModelInfoRequest())).info for each in (there, here)]
    assert infos[0].model == PREFIX
    assert infos[0].checkpoint_digest == infos[1].checkpoint_digest
    starts = [each.launcher.startup.snapshot() for each in (there, here)]
    assert {start.loaded_bytes for start in starts} == {start.expected_bytes for start in starts} != {0}


async def test_stages_come_in_order(serve_vision: ServeVision, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    client = await serve_vision(load=False)
    assert stages(client) == ["resolve"]
    await client.launcher.load()
    entered = [record.args for record in caplog.records if record.name == "day0.startup"]
    assert entered == [("manifest",), ("load",), ("verify",), ("warm_up",), ("ready",)]
    assert stages(client) == ["ready"]


async def test_flipped_byte_in_a_shard_is_never_served(checkpoint: Path, serve_vision: ServeVision) -> None:
    store = ObjectStore(str(checkpoint))
    write_manifest(store, make_manifest(store))
    file, names = sorted(vision_files(checkpoint).items())[-1]
    with opened(checkpoint) as source:
        span = source.weights(lambda name: name == names[-1]).spans[names[-1]]
    flip(checkpoint / file, span.stop - 1)
    client = await serve_vision(load=False, model=checkpoint)
    with pytest.raises(WeightsError, match=rf"{file}: tensor '{names[-1]}': wrong bytes"):
        await client.launcher.load()
    assert stages(client) == ["failed"]
    assert not await ready(client)


async def test_required_manifest_that_is_absent(serve_vision: ServeVision) -> None:
    client = await serve_vision(load=False, require_manifest=True)
    with pytest.raises(WeightsError, match=r"model: day0-manifest\.json"):
        await client.launcher.load()
    assert stages(client) == ["failed"]
    assert not await ready(client)


async def test_a_stopped_service_reads_no_further(serve_vision: ServeVision) -> None:
    client = await serve_vision(load=False)
    await client.launcher.stop()
    with pytest.raises(StartupStopped, match=r"stopped after 0 of \d+ bytes"):
        client.launcher._load_model()
