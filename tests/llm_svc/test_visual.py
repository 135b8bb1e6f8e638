"""Pulling visual tokens from a vision service that misbehaves, over real gRPC."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np
import pytest

from llm_svc.core import ImageInput
from llm_svc.visual import VisualLease, VisualStore
from protos.common.v1 import common_pb2
from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.channel import open_channel
from svc_common.errors import Internal, ServiceError, Unavailable
from svc_common.tensors import WireError, crc32c

HIDDEN = 8
ROWS = np.arange(5 * HIDDEN, dtype=np.float32).reshape(5, HIDDEN)

Pieces = list[vision_pb2.EncodeResponse]


def right_pieces(dtype: int = common_pb2.DTYPE_FLOAT32, data: bytes = ROWS.tobytes()) -> Pieces:
    """Header, two chunks, trailer."""
    width = len(data) // len(ROWS)
    pieces = [
        vision_pb2.EncodeResponse(
            header=vision_pb2.VisualHeader(tokens=5, hidden=HIDDEN, dtype=dtype, digest=b"d" * 32, grid_height=2)
        )
    ]
    for offset, count in ((0, 3), (3, 2)):
        part = data[offset * width : (offset + count) * width]
        chunk = vision_pb2.VisualChunk(offset=offset, count=count, data=part, crc32c=crc32c(part))
        pieces.append(vision_pb2.EncodeResponse(chunk=chunk))
    trailer = vision_pb2.VisualTrailer(tokens=5, bytes=len(data), sha256=hashlib.sha256(data).digest())
    return [*pieces, vision_pb2.EncodeResponse(trailer=trailer)]


@dataclass
class ScriptedVision(vision_pb2_grpc.VisionServiceServicer):
    """Sends `pieces`; waits for `go` after the header; counts its calls and the ones that were cancelled."""

    pieces: Pieces = field(default_factory=right_pieces)
    status: grpc.StatusCode | None = None
    calls: list[vision_pb2.EncodeRequest] = field(default_factory=list)
    ended: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def Encode(
        self, request: vision_pb2.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[vision_pb2.EncodeResponse]:
        self.calls.append(request)
        how = "cancelled"
        try:
            if self.status is not None:
                await context.abort(self.status, "no room here")
            for index, piece in enumerate(self.pieces):
                if index == 1:
                    await self.go.wait()
                yield piece
            how = "done"
        finally:
            self.ended.put_nowait(how)


@dataclass
class Rig:
    vision: ScriptedVision
    store: VisualStore
    arrived: asyncio.Event


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    vision, arrived = ScriptedVision(), asyncio.Event()
    server = grpc.aio.server()
    vision_pb2_grpc.add_VisionServiceServicer_to_server(vision, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = vision_pb2_grpc.VisionServiceStub(channel)
        yield Rig(vision, VisualStore(stub, hidden=HIDDEN, on_rows=arrived.set), arrived)
    await server.stop(None)


def image(data: bytes = b"picture", index: int = 0, label: str = "") -> ImageInput:
    return ImageInput(index, data, label)


async def test_size_is_known_before_the_rows(rig: Rig) -> None:
    lease = VisualLease(rig.store)
    lease.add((image(),))
    visual = await rig.store.header(image())
    assert (visual.count, visual.digest, visual.rows) == (5, b"d" * 32, None)
    rig.vision.go.set()
    await rig.store.rows(image())
    assert rig.arrived.is_set() and visual.rows is not None
    np.testing.assert_array_equal(visual.rows, ROWS)
    lease.release()
    assert len(rig.store) == 0


async def test_bfloat16_and_float16_rows_are_exact(rig: Rig) -> None:
    bfloat16 = (ROWS.view(np.uint32) >> 16).astype("<u2").tobytes()
    float16 = ROWS.astype("<f2").tobytes()
    rig.vision.go.set()
    for data, dtype in ((bfloat16, common_pb2.DTYPE_BFLOAT16), (float16, common_pb2.DTYPE_FLOAT16)):
        rig.vision.pieces = right_pieces(dtype, data)
        lease = VisualLease(rig.store)
        lease.add((image(),))
        visual = await rig.store.header(image())
        await rig.store.rows(image())
        assert visual.rows is not None
        np.testing.assert_array_equal(visual.rows, ROWS)
        lease.release()


async def test_same_picture_is_encoded_once_and_kept_until_the_last_lease(rig: Rig) -> None:
    first, second = VisualLease(rig.store), VisualLease(rig.store)
    first.add((image(label="mine"), image(index=1)))
    second.add((image(label="yours"),))
    await rig.store.header(image())
    assert len(rig.vision.calls) == 1 and len(rig.store) == 1
    assert rig.vision.calls[0].label == "", "one request's words would show up in another's error"
    first.release()
    rig.vision.go.set()
    await rig.store.rows(image())
    second.release()
    assert len(rig.store) == 0
    assert await rig.vision.ended.get() == "done"


async def test_last_lease_cancels_the_call(rig: Rig) -> None:
    lease = VisualLease(rig.store)
    lease.add((image(),))
    await rig.store.header(image())
    lease.release()
    lease.release()
    assert len(rig.store) == 0
    async with asyncio.timeout(10):
        assert await rig.vision.ended.get() == "cancelled"


def drop_trailer(pieces: Pieces) -> None:
    pieces.pop()


def flip_a_bit(pieces: Pieces) -> None:
    data = bytearray(pieces[1].chunk.data)
    data[5] ^= 1
    pieces[1].chunk.data = bytes(data)


def flip_a_bit_and_its_checksum(pieces: Pieces) -> None:
    flip_a_bit(pieces)
    pieces[1].chunk.crc32c = crc32c(pieces[1].chunk.data)


def swap_chunks(pieces: Pieces) -> None:
    pieces[1], pieces[2] = pieces[2], pieces[1]


def lose_a_chunk(pieces: Pieces) -> None:
    del pieces[2]


def widen(pieces: Pieces) -> None:
    pieces[0].header.hidden = HIDDEN + 1


def no_tokens(pieces: Pieces) -> None:
    pieces[0].header.tokens = 0


def no_header(pieces: Pieces) -> None:
    del pieces[0]


def say_nothing(pieces: Pieces) -> None:
    pieces.clear()


FAULTS = (drop_trailer, flip_a_bit, flip_a_bit_and_its_checksum, swap_chunks, lose_a_chunk)
HEADER_FAULTS = (widen, no_tokens, no_header, say_nothing)


@pytest.mark.parametrize("spoil", [*FAULTS, *HEADER_FAULTS])
async def test_whatever_is_not_as_announced_is_an_error_of_ours(rig: Rig, spoil: Callable[[Pieces], None]) -> None:
    spoil(rig.vision.pieces)
    rig.vision.go.set()
    lease = VisualLease(rig.store)
    lease.add((image(index=2),))
    with pytest.raises((Internal, WireError), match="image 2: "):
        await rig.store.rows(image(index=2))
    assert not rig.arrived.is_set()
    lease.release()
    rig.vision.pieces = right_pieces()
    again = VisualLease(rig.store)
    again.add((image(),))
    await rig.store.rows(image())
    again.release()


async def test_status_of_the_vision_service_names_the_image_as_each_request_knows_it(rig: Rig) -> None:
    rig.vision.status = grpc.StatusCode.UNAVAILABLE
    lease = VisualLease(rig.store)
    pictures = (image(index=0, label="cat"), image(index=3))
    lease.add(pictures)
    messages = []
    for picture in pictures:
        with pytest.raises(ServiceError) as caught:
            await rig.store.header(picture)
        assert isinstance(caught.value, Unavailable)
        messages.append(caught.value.message)
    assert messages == ["image 0 (cat): no room here", "image 3: no room here"]
    lease.release()


async def test_vision_service_that_is_away_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        store = VisualStore(vision_pb2_grpc.VisionServiceStub(channel), hidden=HIDDEN, on_rows=lambda: None)
        lease = VisualLease(store)
        lease.add((image(),))
        with pytest.raises(Unavailable, match="image 0: "):
            await store.header(image())
        lease.release()
