"""What the visual store makes of a vision service in trouble; the service is scripted, the calls are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from llm_svc.core import ImageInput
from llm_svc.settings import LlmSettings
from llm_svc.vision_replicas import VisionReplicas
from llm_svc.visual import VisualLease, VisualStore
from protos.common.v1 import common_pb2
from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.errors import ErrorInterceptor, ResourceExhausted, ServiceError, Unavailable
from svc_common.targets import Target

FAILURES = {
    b"draining": Unavailable("the service is ending", reason="DRAINING"),
    b"full": ResourceExhausted("the queue is full", reason="QUEUE_FULL"),
}


class _Failing(vision_pb2_grpc.VisionServiceServicer):
    async def Encode(self, request, context):
        raise FAILURES[request.data]
        yield


@pytest.fixture
async def store() -> AsyncIterator[VisualStore]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    vision_pb2_grpc.add_VisionServiceServicer_to_server(_Failing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    vision = VisionReplicas(LlmSettings(model="unused", vision_target=f"127.0.0.1:{port}"))
    await vision.start()
    yield VisualStore(vision, hidden=64, on_rows=lambda: None)
    await vision.stop()
    await server.stop(None)


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"draining", grpc.StatusCode.UNAVAILABLE, "VISION_UNAVAILABLE"),
        (b"full", grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    ],
)
async def test_trouble_is_told_as_the_vision_services_own(
    store: VisualStore, data: bytes, status: grpc.StatusCode, reason: str
) -> None:
    image = ImageInput(index=2, data=data, label="holiday")
    lease = VisualLease(store)
    lease.add((image,))
    for wait in (store.header, store.rows):
        with pytest.raises(ServiceError) as caught:
            await wait(image)
        assert (caught.value.status, caught.value.reason) == (status, reason)
        assert "image 2 (holiday)" in caught.value.message
    lease.release()
    assert len(store) == 0


class _Headers(vision_pb2_grpc.VisionServiceServicer):
    """Sends headers of 64 elements and no more, until it is told to end; draining it refuses."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.draining = False

    async def Encode(self, request, context):
        self.asked.append(request.data)
        if self.draining:
            raise FAILURES[b"draining"]
        header = vision_pb2.VisualHeader(tokens=1, hidden=64, dtype=common_pb2.DTYPE_FLOAT32, digest=b"d")
        yield vision_pb2.EncodeResponse(header=header)
        await asyncio.Event().wait()


@pytest.fixture
async def two(monkeypatch) -> AsyncIterator[tuple[VisualStore, list[_Headers]]]:
    """Two services on one port of two addresses, behind one name."""
    services, servers, port = [_Headers(), _Headers()], [], 0
    for index, service in enumerate(services):
        server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        vision_pb2_grpc.add_VisionServiceServicer_to_server(service, server)
        port = server.add_insecure_port(f"127.0.0.{index + 1}:{port}")
        await server.start()
        servers.append(server)

    async def both(target: Target) -> frozenset[str]:
        return frozenset(f"127.0.0.{index + 1}:{port}" for index in range(2))

    monkeypatch.setattr("svc_common.addresses.resolve", both)
    vision = VisionReplicas(LlmSettings(model="unused", vision_target=f"dns:///vision.test:{port}"))
    await vision.start()
    yield VisualStore(vision, hidden=64, on_rows=lambda: None), services
    await vision.stop()
    for server in servers:
        await server.stop(None)


async def test_images_spread_over_the_services(two) -> None:
    store, services = two
    lease = VisualLease(store)
    images = [ImageInput(index=index, label="", data=bytes([index])) for index in range(10)]
    lease.add(tuple(images))
    for image in images:
        await store.header(image)
    assert [len(service.asked) for service in services] == [5, 5]
    lease.release()


async def test_another_service_takes_over_from_one_that_drains(two) -> None:
    store, services = two
    services[0].draining = True
    lease = VisualLease(store)
    images = [ImageInput(index=index, label="", data=bytes([index])) for index in range(10)]
    lease.add(tuple(images))
    for image in images:
        assert (await store.header(image)).count == 1
    assert services[0].asked and len(services[1].asked) == 10
    lease.release()


async def test_where_all_drain_the_image_is_refused_once_for_each(two) -> None:
    store, services = two
    services[0].draining = services[1].draining = True
    lease = VisualLease(store)
    image = ImageInput(index=0, label="", data=b"image")
    lease.add((image,))
    with pytest.raises(Unavailable) as caught:
        await store.header(image)
    assert caught.value.reason == "VISION_UNAVAILABLE"
    assert [service.asked for service in services] == [[b"image"]] * 2
    lease.release()
