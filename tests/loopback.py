"""Real services on loopback ports, in an event loop of their own thread, for tests that call them as a client does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.channel import open_channel

ANY_PORT = {"grpc_port": 0, "health_port": 0, "metrics_port": 0}
CALL_SECONDS = 300


@dataclass
class Answer:
    """All events of one Generate call, put together by choice."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[float, tuple[tuple[int, float], ...]]]] = field(default_factory=dict)
    finished: dict[int, common_pb2.ChoiceFinished] = field(default_factory=dict)
    usage: common_pb2.Usage | None = None
    events: list[str] = field(default_factory=list)

    def add(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        self.events.append(kind)
        if kind == "delta":
            delta = event.delta
            self.ids.setdefault(delta.choice, []).extend(delta.token_ids)
            self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
            for position in delta.logprobs:
                top = tuple((entry.token_id, entry.logprob) for entry in position.top)
                self.logprobs.setdefault(delta.choice, []).append((position.chosen.logprob, top))
        elif kind == "finished":
            self.finished[event.finished.choice] = event.finished
        elif kind == "usage":
            self.usage = event.usage


class LoopThread:
    """An event loop in a thread; `run` executes a coroutine there and waits for it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loopback", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_seconds: float = CALL_SECONDS) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LlmOnLoopback:
    """A language service, with a vision service behind it unless `images` is False."""

    def __init__(
        self, checkpoint: Path | str, *, images: bool = True, vision: dict[str, Any] | None = None, **llm: Any
    ) -> None:
        self._thread = LoopThread()
        self._checkpoint = checkpoint
        self._images = images
        self._vision_settings = vision or {}
        self._llm_settings = llm
        self.vision: Any = None
        self.llm: Any = None
        self.stub: Any = None
        self._router: Any = None

    def __enter__(self) -> Self:
        self.run(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self.run(self._stop())
        self._thread.close()

    def run(self, work: Coroutine[Any, Any, Any], timeout_seconds: float = CALL_SECONDS) -> Any:
        return self._thread.run(work, timeout_seconds)

    async def _start(self) -> None:
        from llm_svc.service import LanguageModelService
        from llm_svc.settings import LlmSettings

        target = ""
        if self._images:
            from vision_svc.launch import VisionLauncher
            from vision_svc.settings import VisionSettings

            self.vision = VisionLauncher(VisionSettings(model=self._checkpoint, **ANY_PORT, **self._vision_settings))
            await self.vision.start()
            await self.vision.load()
            target = f"127.0.0.1:{self.vision.server.grpc_port}"
        settings = {"model": str(self._checkpoint), "model_name": "tiny", "block_size": 16, "threads": 1}
        settings |= {"vision_target": target}
        self.llm = LanguageModelService(LlmSettings(**ANY_PORT, **(settings | self._llm_settings)))
        await self.llm.start()
        await self.llm.load()
        self._channel = open_channel(f"127.0.0.1:{self.llm.server.grpc_port}")
        self.stub = llm_pb2_grpc.LanguageServiceStub(self._channel)

    async def _stop(self) -> None:
        if self._router is not None:
            await self._router_channel.close()
            await self._router.stop()
        await self._channel.close()
        await self.llm.stop()
        if self.vision is not None:
            await self.vision.stop()

    async def answer(self, request: llm_pb2.GenerateRequest, timeout_seconds: float | None = None) -> Answer:
        """One call, read to its end."""
        answer = Answer()
        async for event in self.stub.Generate(request, timeout=timeout_seconds):
            answer.add(event)
        return answer

    async def start_router(self) -> Any:
        """A router in front of the language service; gives its stub. It goes with this object."""
        from protos.router.v1 import router_pb2, router_pb2_grpc
        from router_svc.service import Router
        from router_svc.settings import RouterSettings

        target = f"127.0.0.1:{self.llm.server.grpc_port}"
        self._router = Router(RouterSettings(llm_targets=(target,), **ANY_PORT))
        await self._router.start()
        self._router_channel = open_channel(f"127.0.0.1:{self._router.server.grpc_port}")
        stub = router_pb2_grpc.RouterServiceStub(self._router_channel)
        async with asyncio.timeout(30):
            while not (await stub.ListModels(router_pb2.ListModelsRequest())).models:
                await asyncio.sleep(0.02)
        return stub

    def ask(self, request: llm_pb2.GenerateRequest) -> Answer:
        return self.run(self.answer(request))

    def ask_all(self, requests: list[llm_pb2.GenerateRequest]) -> list[Answer]:
        """All calls at once."""

        async def together() -> list[Answer]:
            return await asyncio.gather(*map(self.answer, requests))

        return self.run(together())

    def load(self) -> llm_pb2.GetLoadResponse:
        async def get() -> llm_pb2.GetLoadResponse:
            return await self.stub.GetLoad(llm_pb2.GetLoadRequest())

        return self.run(get())

    def wait_idle(self, timeout_seconds: float = 30) -> llm_pb2.GetLoadResponse:
        """Waits until nothing runs, waits or is held, and gives the load then."""

        async def until_idle() -> llm_pb2.GetLoadResponse:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    load = await self.stub.GetLoad(llm_pb2.GetLoadRequest())
                    busy = load.waiting_requests + load.running_sequences + load.visual_entries + load.open_streams
                    if not busy and load.free_blocks == load.total_blocks:
                        return load
                    await asyncio.sleep(0.01)

        return self.run(until_idle())

    def metric(self, name: str) -> float:
        """A metric's value by its full name."""
        for line in self.llm.metrics.text().splitlines():
            if line.startswith(name + " ") or line.startswith(name + "{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")


def text_part(text: str) -> common_pb2.Part:
    return common_pb2.Part(text=text)


def ids_part(ids: list[int]) -> common_pb2.Part:
    return common_pb2.Part(token_ids=common_pb2.TokenIds(ids=ids))


def image_part(data: bytes, label: str = "") -> common_pb2.Part:
    return common_pb2.Part(image=common_pb2.Image(data=data, label=label))


def completion(*parts: common_pb2.Part, model: str = "tiny", **sampling: Any) -> llm_pb2.GenerateRequest:
    return llm_pb2.GenerateRequest(
        model=model,
        completion=common_pb2.Completion(parts=parts),
        sampling=common_pb2.SamplingParams(**sampling),
    )


def chat(*parts: common_pb2.Part, model: str = "tiny", **sampling: Any) -> llm_pb2.GenerateRequest:
    message = common_pb2.Message(role=common_pb2.ROLE_USER, parts=parts)
    return llm_pb2.GenerateRequest(
        model=model, chat=common_pb2.Chat(messages=[message]), sampling=common_pb2.SamplingParams(**sampling)
    )
