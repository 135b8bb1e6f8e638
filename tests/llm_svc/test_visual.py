"""What the visual store makes of a vision service in trouble; the service is scripted, the calls are real."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from llm_svc.core import ImageInput
from llm_svc.visual import VisualLease, VisualStore
from protos.vision.v1 import vision_pb2_grpc
from svc_common.channel import open_channel
from svc_common.errors import ErrorInterceptor, ResourceExhausted, ServiceError, Unavailable

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
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield VisualStore(vision_pb2_grpc.VisionServiceStub(channel), hidden=64, on_rows=lambda: None)
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
