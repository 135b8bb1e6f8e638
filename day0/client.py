"""A client of `router.v1`: requests from text and image parts, answers with their times; knows no terminal."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2, router_pb2_grpc
from svc_common.channel import open_channel
from svc_common.errors import error_from_rpc
from svc_common.settings import DEFAULT_MAX_MESSAGE_BYTES


def text_part(text: str) -> common_pb2.Part:
    """A piece of plain text."""
    return common_pb2.Part(text=text)


def image_part(image: bytes | Path | str, *, label: str = "") -> common_pb2.Part:
    """A picture: its encoded bytes, a file to read, or a `data:` or `http(s):` URL that the router resolves.

    OSError where the file cannot be read. The label comes back in error messages; a file's name by default.
    """
    if isinstance(image, bytes):
        return common_pb2.Part(image=common_pb2.Image(data=image, label=label))
    if isinstance(image, Path):
        return common_pb2.Part(image=common_pb2.Image(data=image.read_bytes(), label=label or image.name))
    return common_pb2.Part(image=common_pb2.Image(url=image, label=label))


def chat_request(
    parts: Sequence[common_pb2.Part],
    *,
    system: str | None = None,
    model: str = "",
    sampling: common_pb2.SamplingParams | None = None,
) -> router_pb2.GenerateRequest:
    """One user turn of ordered parts, after an optional system turn."""
    messages = [common_pb2.Message(role=common_pb2.ROLE_USER, parts=parts)]
    if system is not None:
        messages.insert(0, common_pb2.Message(role=common_pb2.ROLE_SYSTEM, parts=[text_part(system)]))
    return router_pb2.GenerateRequest(model=model, chat=common_pb2.Chat(messages=messages), sampling=sampling)


def completion_request(
    parts: Sequence[common_pb2.Part], *, model: str = "", sampling: common_pb2.SamplingParams | None = None
) -> router_pb2.GenerateRequest:
    """A raw prompt of ordered parts, continued as it is."""
    return router_pb2.GenerateRequest(model=model, completion=common_pb2.Completion(parts=parts), sampling=sampling)


@dataclass(slots=True)
class Answer:
    """What came back for one request, and when. All times are on the monotonic clock, in seconds.

    `token_times` has the arrival of each delta that carried tokens and how many it carried, over all choices.
    """

    sent_seconds: float
    request_id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    token_times: list[tuple[float, int]] = field(default_factory=list)
    usage: common_pb2.Usage | None = None
    finished_seconds: float = 0.0

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.texts.get(0, "")

    @property
    def ttft_seconds(self) -> float | None:
        """From sending to the first token; None without a token."""
        return self.token_times[0][0] - self.sent_seconds if self.token_times else None

    @property
    def e2e_seconds(self) -> float:
        """From sending to the end of the stream."""
        return self.finished_seconds - self.sent_seconds

    @property
    def completion_tokens(self) -> int:
        """Tokens received, over all choices."""
        return sum(count for _, count in self.token_times)

    @property
    def itl_seconds(self) -> list[float]:
        """Times between successive deltas with tokens."""
        times = [at for at, _ in self.token_times]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of a token after the first delta; None where nothing follows it."""
        later = self.completion_tokens - self.token_times[0][1] if self.token_times else 0
        return (self.token_times[-1][0] - self.token_times[0][0]) / later if later > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first delta, over the time they took; None where nothing follows it."""
        tpot = self.tpot_seconds
        return 1 / tpot if tpot else None

    def add(self, event: router_pb2.GenerateResponse, now_seconds: float) -> None:
        """Take one event of the stream."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.request_id = event.accepted.request_id
        elif kind == "delta":
            choice = event.delta.choice
            self.texts[choice] = self.texts.get(choice, "") + event.delta.text
            self.token_ids.setdefault(choice, []).extend(event.delta.token_ids)
            if event.delta.token_ids:
                self.token_times.append((now_seconds, len(event.delta.token_ids)))
        elif kind == "finished":
            name = common_pb2.FinishReason.Name(event.finished.reason)
            self.reasons[event.finished.choice] = name.removeprefix("FINISH_REASON_").lower()
        elif kind == "usage":
            self.usage = event.usage


class RouterClient:
    """Talks to one router; used as `async with RouterClient("127.0.0.1:50051") as client`.

    Every method raises `svc_common.errors.ServiceError` for a call that failed.
    """

    def __init__(self, target: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        self.target = target
        self._channel: grpc.aio.Channel | None = None
        self._max_message_bytes = max_message_bytes
        self._stub: Any = None

    async def __aenter__(self) -> RouterClient:
        self._channel = open_channel(self.target, max_message_bytes=self._max_message_bytes)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._channel is not None
        await self._channel.close()

    async def list_models(self, *, timeout_seconds: float | None = None) -> list[common_pb2.ModelInfo]:
        """Models with a ready replica, by name."""
        try:
            response = await self._stub.ListModels(router_pb2.ListModelsRequest(), timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return list(response.models)

    async def model_info(self, model: str = "", *, timeout_seconds: float | None = None) -> common_pb2.ModelInfo:
        """What one model is; the name may be empty where one is served."""
        try:
            response = await self._stub.GetModelInfo(
                router_pb2.GetModelInfoRequest(model=model), timeout=timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        info: common_pb2.ModelInfo = response.info
        return info

    async def generate(
        self, request: router_pb2.GenerateRequest, *, timeout_seconds: float | None = None
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Events as they come. Leaving the loop early cancels the request."""
        call = self._stub.Generate(request, timeout=timeout_seconds)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()

    async def ask(
        self,
        request: router_pb2.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> Answer:
        """The whole answer; `on_text(choice, text)` gets each new piece as it comes."""
        answer = Answer(sent_seconds=time.monotonic())
        async for event in self.generate(request, timeout_seconds=timeout_seconds):
            answer.add(event, time.monotonic())
            if on_text is not None and event.WhichOneof("event") == "delta" and event.delta.text:
                on_text(event.delta.choice, event.delta.text)
        answer.finished_seconds = time.monotonic()
        return answer
