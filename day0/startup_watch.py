"""Asks a service that starts how far it has come; knows no terminal and no weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from day0.plan import ServicePlan
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from protos.vision.v1 import vision_pb2, vision_pb2_grpc

# Imports alone take seconds, so the first connections fail; look again soon.
QUICK_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_POLL_SECONDS = 0.2

# The services that read weights; the router reads none.
_QUESTIONS: dict[str, tuple[Any, Any]] = {
    "llm": (llm_pb2_grpc.LanguageServiceStub, llm_pb2.GetModelInfoRequest),
    "vision": (vision_pb2_grpc.VisionServiceStub, vision_pb2.GetModelInfoRequest),
}


async def watch_startup(plan: ServicePlan, told: Callable[[common_pb2.StartupProgress], None]) -> None:
    """Calls `told` with each answer until the start is over; at once over for a service without weights."""
    if plan.name not in _QUESTIONS:
        return
    make_stub, make_request = _QUESTIONS[plan.name]
    async with grpc.aio.insecure_channel(plan.target, options=QUICK_RECONNECT) as channel:
        stub = make_stub(channel)
        while True:
            # It does not listen yet, or it ends; whoever waits for its process hears of that.
            with suppress(grpc.aio.AioRpcError):
                answer = await stub.GetModelInfo(make_request(), wait_for_ready=True)
                told(answer.startup)
                if answer.startup.stage in ("ready", "failed"):
                    return
            await asyncio.sleep(_POLL_SECONDS)
