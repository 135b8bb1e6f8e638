"""A real service from loading to drained: readiness, liveness, what it says of itself."""

from __future__ import annotations

import asyncio
import threading

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.vision.v1 import vision_pb2
from svc_common.channel import open_channel
from svc_common.errors import error_from_rpc
from tests.vision_svc.client import Client, Gate, ServeVision, noise, refusal
from vision_svc.server import SERVICE_NAME

# Life cycle: cases 43 and 44.


async def readiness(client: Client, service: str) -> int:
    async with open_channel(f"127.0.0.1:{client.launcher.health.port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def test_not_ready_before_one_real_forward(serve_vision: ServeVision, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await serve_vision(load=False)
    reached, go_on = threading.Event(), threading.Event()

    def slow_warm_up(encoder: object) -> None:
        reached.set()
        assert go_on.wait(20)

    monkeypatch.setattr("vision_svc.encoder.Encoder.warm_up", slow_warm_up)
    loading = asyncio.create_task(client.launcher.load())
    await asyncio.to_thread(reached.wait, 20)
    assert await readiness(client, SERVICE_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await readiness(client, "") == health_pb2.HealthCheckResponse.SERVING
    early = await client.stub.GetModelInfo(vision_pb2.GetModelInfoRequest())
    assert early.startup.stage == "warm_up" and not early.HasField("info")
    assert early.startup.loaded_bytes == early.startup.expected_bytes > 0
    for call in (client.encode(noise(1)), client.load()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        error = error_from_rpc(caught.value)
        assert error.reason == "LOADING" and "stage warm_up, 100 % of" in error.message
    go_on.set()
    await loading
    assert await readiness(client, SERVICE_NAME) == health_pb2.HealthCheckResponse.SERVING
    assert (await client.encode(noise(1))).header.tokens


async def test_model_info(serve_vision: ServeVision) -> None:
    client = await serve_vision(model_name="glm")
    answer = await client.stub.GetModelInfo(vision_pb2.GetModelInfoRequest())
    info = answer.info
    assert answer.startup.stage == "ready"
    assert (info.model, info.tier, list(info.modalities)) == ("glm", "upstream", ["image"])
    assert info.architecture == "Glm5NextForConditionalGeneration"
    assert (info.dtype, info.visual_hidden, info.context_tokens) == ("float32", 64, 0)
    assert len(info.checkpoint_digest) == 64
    assert {"day0", "torch", "transformers"} <= set(info.versions)


async def test_drain_finishes_running_streams(serve_vision: ServeVision) -> None:
    client = await serve_vision(drain_seconds=20)
    gate = Gate(client)
    running = asyncio.create_task(client.encode(noise(1)))
    await client.until(lambda load: load.running_images == 1)
    draining = asyncio.create_task(client.launcher.stop())
    while not client.launcher.server.draining:
        await asyncio.sleep(0)
    assert await readiness(client, SERVICE_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    error = await refusal(client, noise(2))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    gate.open.set()
    assert (await running).header.tokens
    await draining
