"""The LanguageService on the wire: one request in, its events out; knows streams, not scheduling."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from day0_kernels.workspace import Workspace
from llm_svc.core import ImageInput, ImageSpan, Prompt, PromptTokens, Request, VisualTokens
from llm_svc.engine import Engine
from llm_svc.output import Event, FailureEvent, FinishEvent, OutputChannel, TokenEvent, UsageEvent
from llm_svc.visual import VisualLease, VisualStore
from llm_svc.wire import RequestReader, write_accepted, write_delta, write_finished, write_usage
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable, to_service_error
from svc_common.startup import Startup

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class Served:
    """What a loaded service has; the servicer answers UNAVAILABLE until it gets one."""

    def __init__(
        self,
        engine: Engine,
        reader: RequestReader,
        visual: VisualStore | None,
        info: common_pb2.ModelInfo,
        workspace: Workspace | None,
        token_bytes: Callable[[int], bytes],
        image_token_id: int | None,
        max_running_sequences: int,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.visual = visual
        self._info = info
        self._workspace = workspace
        self.token_bytes = token_bytes
        self.image_token_id = image_token_id
        self.max_running_sequences = max_running_sequences

    @property
    def info(self) -> common_pb2.ModelInfo:
        """The model as it is now: what the workspace has held grows while it serves."""
        info = common_pb2.ModelInfo()
        info.CopyFrom(self._info)
        if self._workspace is not None:
            info.workspace_bytes = self._workspace.capacity_bytes
            info.workspace_high_water_bytes = self._workspace.high_water_bytes
        return info


class LanguageServicer(llm_pb2_grpc.LanguageServiceServicer):
    """Generate, GetModelInfo, GetLoad; the first and the last are UNAVAILABLE until there is `served`."""

    def __init__(self, startup: Startup, *, max_open_requests: int, output_buffer_tokens: int) -> None:
        self.served: Served | None = None
        self._startup = startup
        self.open_streams = 0
        self._max_open_requests = max_open_requests
        self._output_buffer_tokens = output_buffer_tokens

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Context) -> None:
        """Answers one request; whatever way the call ends, all it held is given back."""
        served = self._ready()
        if self.open_streams >= self._max_open_requests:
            raise ResourceExhausted(
                f"max_open_requests: {self.open_streams} requests are open",
                field="max_open_requests",
                limit=self._max_open_requests,
                value=self.open_streams + 1,
                reason="QUEUE_FULL",
            )
        self.open_streams += 1
        lease = None if served.visual is None else VisualLease(served.visual)
        request_id = uuid.uuid4().hex
        try:
            parsed = await asyncio.to_thread(served.reader.read, request, request_id)
            prompt = await self._lay_out(served, parsed, lease)
            served.engine.check_fits(prompt)
            await context.write(write_accepted(request_id))
            await self._answer(served, parsed, prompt, context)
        finally:
            served.engine.abort(request_id)
            if lease is not None:
                lease.release()
            self.open_streams -= 1

    async def GetModelInfo(
        self, request: llm_pb2.GetModelInfoRequest, context: Context
    ) -> llm_pb2.GetModelInfoResponse:
        """How far the start has come and, once it is over, what is served and how."""
        info = None if self.served is None else self._ready().info
        return llm_pb2.GetModelInfoResponse(info=info, startup=self._startup.snapshot())

    async def GetLoad(self, request: llm_pb2.GetLoadRequest, context: Context) -> llm_pb2.GetLoadResponse:
        """The engine's counters as of its last step; UNAVAILABLE while loading."""
        served = self._ready()
        load = served.engine.load
        return llm_pb2.GetLoadResponse(
            queued_tokens=load.queued_tokens,
            waiting_requests=load.waiting_requests,
            running_sequences=load.running_sequences,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            free_state_slots=load.free_state_slots,
            total_state_slots=load.total_state_slots,
            visual_entries=0 if served.visual is None else len(served.visual),
            open_streams=self.open_streams,
            max_running_sequences=served.max_running_sequences,
        )

    def _ready(self) -> Served:
        if self.served is None:
            raise self._startup.unavailable("the language service")
        if not self.served.engine.alive:
            raise Unavailable("the engine has stopped", reason="ENGINE_DEAD")
        return self.served

    async def _lay_out(self, served: Served, request: Request, lease: VisualLease | None) -> Prompt:
        """Starts an encoding for each distinct image, waits for their sizes, and puts the placeholders in place."""
        if not request.images:
            visuals: list[VisualTokens] = []
        elif served.visual is None or lease is None or served.image_token_id is None:
            raise InvalidArgument(
                f"image {request.images[0].index}: this service takes text only",
                field="image",
                limit=0,
                value=len(request.images),
                reason="NO_VISION",
            )
        else:
            lease.add(request.images)
            visuals = [await served.visual.header(image) for image in request.images]
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for segment in request.segments:
            if isinstance(segment, PromptTokens):
                ids.extend(segment.ids)
            else:
                assert served.image_token_id is not None
                visual = visuals[segment.index]
                spans.append(ImageSpan(len(ids), visual))
                ids.extend([served.image_token_id] * visual.count)
        if len(spans) != len(request.images):
            raise Internal(f"{len(request.images)} images and {len(spans)} places for them", reason="PLACEHOLDERS")
        return Prompt(tuple(ids), tuple(spans))

    async def _answer(self, served: Served, request: Request, prompt: Prompt, context: Context) -> None:
        """Runs the request and writes its events until the last one."""
        channel = OutputChannel(asyncio.get_running_loop(), limit_tokens=self._output_buffer_tokens)
        served.engine.submit(request, prompt, channel)
        rows = asyncio.create_task(_all_rows(served.visual, request.images))
        rows.add_done_callback(lambda done: _report_failure(done, channel))
        token_bytes = served.token_bytes if request.sampling.logprobs is not None else None
        try:
            while True:
                events, held_up = await channel.next_events()
                if held_up:
                    served.engine.nudge()
                for event in events:
                    if isinstance(event, FailureEvent):
                        raise event.error
                    await context.write(_write(event, token_bytes))
                    if isinstance(event, UsageEvent):
                        return
        finally:
            rows.cancel()


async def _all_rows(visual: VisualStore | None, images: tuple[ImageInput, ...]) -> None:
    """Waits for every image's rows; the first failure is the request's."""
    if visual is not None:
        for image in images:
            await visual.rows(image)


def _report_failure(rows: asyncio.Task[None], channel: OutputChannel) -> None:
    if rows.cancelled():
        return
    error = rows.exception()
    if error is not None:
        channel.push(FailureEvent(to_service_error(error)))
        channel.wake()


def _write(event: Event, token_bytes: Callable[[int], bytes] | None) -> llm_pb2.GenerateResponse:
    match event:
        case TokenEvent(choice, text, tokens):
            return write_delta(choice, text, tokens, token_bytes)
        case FinishEvent(choice, reason, stop):
            return write_finished(choice, reason, stop)
        case UsageEvent():
            return write_usage(
                prompt_tokens=event.prompt_tokens,
                cached_tokens=event.cached_tokens,
                visual_tokens=event.visual_tokens,
                completion_tokens=event.completion_tokens,
            )
        case FailureEvent(error):
            raise error
