"""A vision client for tests that checks every stream it reads, and a gate that holds the encoder still."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np
import pytest
from PIL import Image

from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.tensors import RowAssembler
from vision_svc.encoder import EncodeError, VisualTokens
from vision_svc.launch import VisionLauncher
from vision_svc.processor import Patches

Bytes = Callable[[str], bytes]


@dataclass
class Encoded:
    """What one Encode stream said, checked against its own sums."""

    header: vision_pb2.VisualHeader
    chunks: list[vision_pb2.VisualChunk]
    trailer: vision_pb2.VisualTrailer
    data: bytes

    @property
    def rows(self) -> np.ndarray:
        """float32 [tokens, hidden]."""
        return np.frombuffer(self.data, np.float32).reshape(self.header.tokens, self.header.hidden)


@dataclass
class Client:
    """A service on loopback and a stub that talks to it."""

    launcher: VisionLauncher
    stub: vision_pb2_grpc.VisionServiceStub

    async def encode(self, data: bytes, label: str = "", **call: Any) -> Encoded:
        """One whole stream; fails when its pieces, order or sums are wrong."""
        header, trailer, chunks = None, None, []
        async for response in self.stub.Encode(vision_pb2.EncodeRequest(data=data, label=label), **call):
            assert trailer is None, "a piece after the trailer"
            match response.WhichOneof("piece"):
                case "header":
                    assert header is None
                    header = response.header
                    rows = RowAssembler(header.tokens, header.hidden * 4)
                case "chunk":
                    chunk = response.chunk
                    assert len(chunk.data) <= 1024 * 1024
                    rows.add(chunk.offset, chunk.count, chunk.data, chunk.crc32c)
                    chunks.append(chunk)
                case "trailer":
                    trailer = response.trailer
        assert header is not None and trailer is not None
        return Encoded(header, chunks, trailer, bytes(rows.finish(trailer.tokens, trailer.bytes, trailer.sha256)))

    async def load(self) -> vision_pb2.GetLoadResponse:
        """GetLoad."""
        return await self.stub.GetLoad(vision_pb2.GetLoadRequest())

    async def until(self, true_of: Callable[[vision_pb2.GetLoadResponse], bool]) -> vision_pb2.GetLoadResponse:
        """Asks for the load until the condition holds; TimeoutError when it never does."""
        async with asyncio.timeout(30):
            while not true_of(load := await self.load()):
                pass
        return load

    async def until_idle(self) -> vision_pb2.GetLoadResponse:
        """Asks until every counter but the cache's is back at its start value."""
        return await self.until(
            lambda load: not (load.waiting_images or load.running_images or load.open_streams or load.waiting_patches)
        )


ServeVision = Callable[..., Awaitable[Client]]


def noise(seed: int, size: tuple[int, int] = (60, 60)) -> bytes:
    """A PNG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


class Gate:
    """Holds the encoder of a running service still until `open` is set."""

    def __init__(self, client: Client) -> None:
        pipeline = client.launcher.pipeline
        assert pipeline is not None
        self.open = threading.Event()
        self.batches: list[int] = []
        self._encode = pipeline.batcher._encode_batch
        pipeline.batcher._encode_batch = self._held

    def _held(self, images: Sequence[Patches]) -> list[VisualTokens | EncodeError]:
        self.batches.append(len(images))
        assert self.open.wait(20)
        return self._encode(images)


async def refusal(client: Client, data: bytes, label: str = "") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.encode(data, label)
    return caught.value
