"""A router that answers from a script, over real gRPC on loopback; for tests of the client side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2, router_pb2_grpc
from svc_common.errors import ErrorInterceptor, InvalidArgument


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers every request with `pieces`, keeps the requests; a question "refuse" is refused, "wait" never ends."""

    def __init__(self) -> None:
        self.target = ""
        self.requests: list[router_pb2.GenerateRequest] = []
        self.pieces = ["Paris", " is", " it", "\x1b[31m."]
        self.cancelled = asyncio.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        question = request.chat.messages[-1].parts[-1].text
        if question == "refuse":
            raise InvalidArgument("too large", field="max_tokens", limit=10, value=11)
        if question == "wait":
            context.add_done_callback(lambda _: self.cancelled.set())
        yield router_pb2.GenerateResponse(accepted=common_pb2.Accepted(request_id="r-1"))
        for number, piece in enumerate(self.pieces):
            delta = common_pb2.Delta(text=piece, token_ids=[number, number + 10])
            yield router_pb2.GenerateResponse(delta=delta)
        if question == "wait":
            await asyncio.Event().wait()
        reason = common_pb2.FINISH_REASON_STOP
        yield router_pb2.GenerateResponse(finished=common_pb2.ChoiceFinished(reason=reason))
        usage = common_pb2.Usage(prompt_tokens=30, cached_tokens=16, visual_tokens=12, completion_tokens=8)
        yield router_pb2.GenerateResponse(usage=usage)

    async def ListModels(self, request, context):
        return router_pb2.ListModelsResponse(models=[common_pb2.ModelInfo(model="m")])

    async def GetModelInfo(self, request, context):
        return router_pb2.GetModelInfoResponse(info=common_pb2.ModelInfo(model=request.model or "m"))


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    servicer = ScriptedRouter()
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    servicer.target = f"127.0.0.1:{port}"
    yield servicer
    await server.stop(None)
