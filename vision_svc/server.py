"""Answers vision.v1 calls from a pipeline; knows no image format, no tensor and no start-up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc.aio

from protos.common.v1 import common_pb2
from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.errors import InvalidArgument, ResourceExhausted, ServiceError, to_service_error
from svc_common.metrics import VisionMetrics
from svc_common.startup import Startup
from svc_common.tensors import chunk_rows
from vision_svc.encoder import VisualTokens
from vision_svc.pipeline import Encoding, Pipeline

SERVICE_NAME = vision_pb2.DESCRIPTOR.services_by_name["VisionService"].full_name
_DTYPES = {
    "float32": (common_pb2.DTYPE_FLOAT32, 4),
    "bfloat16": (common_pb2.DTYPE_BFLOAT16, 2),
}
_MAX_LABEL_CHARACTERS = 100


class VisionServicer(vision_pb2_grpc.VisionServiceServicer):
    """All but GetModelInfo is UNAVAILABLE, reason LOADING, until `begin`."""

    def __init__(self, metrics: VisionMetrics, startup: Startup) -> None:
        self._metrics = metrics
        self._startup = startup
        self._pipeline: Pipeline | None = None
        self._info = common_pb2.ModelInfo()
        self._merge_size = 0
        self._open_streams = 0

    def begin(self, pipeline: Pipeline, info: common_pb2.ModelInfo, merge_size: int) -> None:
        """From now on calls are served. `merge_size` is the side, in patches, of one visual token."""
        self._pipeline = pipeline
        self._info = info
        self._merge_size = merge_size
        self._metrics.num_requests_waiting.set_function(lambda: pipeline.waiting_images)
        self._metrics.num_requests_running.set_function(lambda: pipeline.batcher.running_images)

    async def Encode(
        self, request: vision_pb2.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[vision_pb2.EncodeResponse]:
        """Header as soon as the picture is decoded, then chunks, then trailer; errors name the request's label."""
        pipeline = self._ready()
        started = time.monotonic()
        self._open_streams += 1
        try:
            with _naming(request.label):
                async with pipeline.open(request.data) as encoding:
                    yield await self._header(encoding)
                    tokens = await encoding.tokens()
                    row_bytes = len(tokens.data) // tokens.tokens
                    for offset, count, data, crc32c in chunk_rows(tokens.data, tokens.tokens, row_bytes):
                        chunk = vision_pb2.VisualChunk(offset=offset, count=count, data=data, crc32c=crc32c)
                        yield vision_pb2.EncodeResponse(chunk=chunk)
                    yield _trailer(tokens, encoding.cached)
            self._count(tokens, encoding.cached, time.monotonic() - started)
        except Exception as error:
            self._metrics.request_failure_total.labels(status=to_service_error(error).status.name).inc()
            raise
        finally:
            self._open_streams -= 1

    async def GetModelInfo(
        self, request: vision_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vision_pb2.GetModelInfoResponse:
        """How far the start has come and, once it is over, what is served."""
        info = None if self._pipeline is None else self._info
        return vision_pb2.GetModelInfoResponse(info=info, startup=self._startup.snapshot())

    async def GetLoad(
        self, request: vision_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> vision_pb2.GetLoadResponse:
        """How busy the encoder is; all but the cache's two counters are 0 when no call is open."""
        pipeline = self._ready()
        return vision_pb2.GetLoadResponse(
            waiting_images=pipeline.waiting_images,
            running_images=pipeline.batcher.running_images,
            cached_images=pipeline.cache.images,
            cached_bytes=pipeline.cache.held_bytes,
            open_streams=self._open_streams,
            waiting_patches=pipeline.batcher.waiting_patches,
        )

    def _ready(self) -> Pipeline:
        if self._pipeline is None:
            raise self._startup.unavailable("the vision service")
        return self._pipeline

    async def _header(self, encoding: Encoding) -> vision_pb2.EncodeResponse:
        grid = await encoding.grid()
        dtype, _ = _DTYPES[self._info.dtype]
        return vision_pb2.EncodeResponse(
            header=vision_pb2.VisualHeader(
                tokens=grid.height * grid.width // self._merge_size**2,
                grid_frames=1,
                grid_height=grid.height,
                grid_width=grid.width,
                hidden=self._info.visual_hidden,
                dtype=dtype,
                digest=encoding.digest,
            )
        )

    def _count(self, tokens: VisualTokens, cached: bool, seconds: float) -> None:
        self._metrics.visual_tokens_total.inc(tokens.tokens)
        self._metrics.encode_cache_hits_total.inc(cached)
        self._metrics.e2e_request_latency_seconds.observe(seconds)
        self._metrics.request_success_total.labels(finished_reason="encoded").inc()


def _trailer(tokens: VisualTokens, cached: bool) -> vision_pb2.EncodeResponse:
    return vision_pb2.EncodeResponse(
        trailer=vision_pb2.VisualTrailer(
            tokens=tokens.tokens, bytes=len(tokens.data), sha256=tokens.sha256, cached=cached
        )
    )


@contextmanager
def _naming(label: str) -> Iterator[None]:
    """Puts the caller's label in front of errors about the image, on a copy: several callers may share one error."""
    try:
        yield
    except (InvalidArgument, ResourceExhausted) as error:
        name = f"image {label[:_MAX_LABEL_CHARACTERS]!r}" if label else "image"
        copy: type[ServiceError] = type(error)
        raise copy(
            f"{name}: {error.message}", field=error.field, limit=error.limit, value=error.value, reason=error.reason
        ) from error
