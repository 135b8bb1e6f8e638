"""Pulls visual tokens from the vision service, one call an image, shared by the requests that show the same picture."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np

from llm_svc.core import ImageInput, VisualTokens
from llm_svc.vision_replicas import VisionReplica, VisionReplicas
from protos.common.v1 import common_pb2
from protos.vision.v1 import vision_pb2
from svc_common.deadline import current_deadline
from svc_common.errors import Internal, ServiceError, Unavailable, error_from_rpc
from svc_common.tensors import RowAssembler

_ELEMENT_BYTES = {
    common_pb2.DTYPE_FLOAT32: 4,
    common_pb2.DTYPE_BFLOAT16: 2,
    common_pb2.DTYPE_FLOAT16: 2,
}


@dataclass(slots=True)
class _Entry:
    """One image on its way or here; it goes, and its call with it, when its last lease ends."""

    task: asyncio.Task[None]
    header: asyncio.Future[VisualTokens]
    leases: int = 0


@dataclass
class VisualLease:
    """What one request holds of the store; `release` must follow on every way out."""

    store: VisualStore
    keys: list[bytes] = field(default_factory=list)

    def add(self, images: tuple[ImageInput, ...]) -> None:
        """Starts one call for each distinct image that nobody has asked for yet."""
        for image in images:
            self.keys.append(self.store._take(image))

    def release(self) -> None:
        """Gives the images back."""
        for key in self.keys:
            self.store._release(key)
        self.keys = []


class VisualStore:
    """Visual tokens held for requests in flight.

    `on_rows` is called when an image's rows have arrived and were verified. `hidden` is the width the model takes.
    """

    def __init__(self, vision: VisionReplicas, *, hidden: int, on_rows: Callable[[], None]) -> None:
        self._vision = vision
        self._hidden = hidden
        self._on_rows = on_rows
        self._entries: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def _take(self, image: ImageInput) -> bytes:
        key = _key(image)
        entry = self._entries.get(key)
        if entry is None:
            header: asyncio.Future[VisualTokens] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._pull(image, header))
            # Whoever waits gets the error; an error that nobody waits for any more is no news.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            entry = self._entries[key] = _Entry(task, header)
        entry.leases += 1
        return key

    async def header(self, image: ImageInput) -> VisualTokens:
        """Waits until the size of a leased image is known; its rows follow later."""
        try:
            return await asyncio.shield(self._entries[_key(image)].header)
        except ServiceError as error:
            raise _about(image, error) from None

    async def rows(self, image: ImageInput) -> None:
        """Waits until the rows of a leased image are here; raises what kept them away."""
        try:
            await asyncio.shield(self._entries[_key(image)].task)
        except ServiceError as error:
            raise _about(image, error) from None

    def _release(self, key: bytes) -> None:
        entry = self._entries[key]
        entry.leases -= 1
        if entry.leases == 0:
            del self._entries[key]
            entry.task.cancel()

    async def _pull(self, image: ImageInput, header: asyncio.Future[VisualTokens]) -> None:
        # The call serves every request that shows this picture, so no single one's deadline bounds it.
        current_deadline.set(None)
        tried: list[VisionReplica] = []
        try:
            while True:
                tried.append(self._vision.choose(tried))
                try:
                    return await self._receive(tried[-1], image, header)
                except Unavailable:
                    # Another service may take over as long as nobody was told anything.
                    if header.done() or not self._vision.others(tried):
                        raise
        except asyncio.CancelledError:
            header.cancel()
            raise
        except ServiceError as error:
            if not header.done():
                header.set_exception(error)
                header.exception()
            raise

    async def _receive(self, vision: VisionReplica, image: ImageInput, header: asyncio.Future[VisualTokens]) -> None:
        # Without the label: another request that shows the same picture must not read this one's words in an error.
        call = vision.encode(vision_pb2.EncodeRequest(data=image.data))
        visual: VisualTokens | None = None
        assembler: RowAssembler | None = None
        dtype = common_pb2.DTYPE_UNSPECIFIED
        rows: bytearray | None = None
        try:
            async for piece in call:
                match piece.WhichOneof("piece"):
                    case "header":
                        dtype = piece.header.dtype
                        visual = self._check_header(piece.header)
                        assembler = RowAssembler(visual.count, self._hidden * _ELEMENT_BYTES[dtype])
                        header.set_result(visual)
                    case "chunk" if assembler is not None:
                        chunk = piece.chunk
                        assembler.add(chunk.offset, chunk.count, chunk.data, chunk.crc32c)
                    case "trailer" if assembler is not None:
                        trailer = piece.trailer
                        rows = assembler.finish(trailer.tokens, trailer.bytes, trailer.sha256)
                    case other:
                        raise Internal(f"the vision service sent {other} out of order", reason="VISION_PROTOCOL")
        except grpc.aio.AioRpcError as error:
            failure = error_from_rpc(error)
            if isinstance(failure, Unavailable):
                # Under a reason of its own: the router would take its DRAINING for ours and send us nothing more.
                message = f"the vision service is not available: {failure.message}"
                raise Unavailable(message, reason="VISION_UNAVAILABLE") from None
            raise failure from None
        finally:
            call.cancel()
        if visual is None or rows is None:
            raise Internal("the vision service ended its stream early", reason="VISION_PROTOCOL")
        visual.rows = _to_float32(rows, dtype).reshape(visual.count, self._hidden)
        self._on_rows()

    def _check_header(self, header: vision_pb2.VisualHeader) -> VisualTokens:
        if header.hidden != self._hidden or header.dtype not in _ELEMENT_BYTES or header.tokens < 1:
            raise Internal(
                f"the vision service sends {header.tokens} tokens of {header.hidden} elements, dtype {header.dtype}; "
                f"the model takes {self._hidden} elements",
                reason="VISION_MISMATCH",
            )
        return VisualTokens(digest=header.digest, count=header.tokens)


def _key(image: ImageInput) -> bytes:
    return hashlib.sha256(image.data).digest()


def _about(image: ImageInput, error: ServiceError) -> ServiceError:
    """The same error, naming the image by its place in the request."""
    name = f"image {image.index}" + (f" ({image.label})" if image.label else "")
    return type(error)(
        f"{name}: {error.message}", field=error.field, limit=error.limit, value=error.value, reason=error.reason
    )


def _to_float32(data: bytearray, dtype: int) -> np.ndarray:
    """Little-endian elements as float32, exactly."""
    if dtype == common_pb2.DTYPE_FLOAT32:
        return np.frombuffer(data, dtype="<f4")
    if dtype == common_pb2.DTYPE_FLOAT16:
        return np.frombuffer(data, dtype="<f2").astype(np.float32)
    return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
