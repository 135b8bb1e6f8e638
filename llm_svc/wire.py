"""Protos to the engine's nouns and back; the only place that knows both, and where every request is checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm_svc.core import FinishReason, ImageInput, PromptSegment, PromptTokens, Request, SampledToken
from llm_svc.prompt import PromptBuilder
from llm_svc.prompt_parts import ChatMessage, ImagePart, PromptPart, TextPart, TokenIdsPart
from llm_svc.request_limits import RequestLimits, check_size
from llm_svc.sampling_checks import GenerationDefaults, read_sampling
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from svc_common.errors import InvalidArgument, NotFound

ROLES = {
    common_pb2.ROLE_SYSTEM: "system",
    common_pb2.ROLE_USER: "user",
    common_pb2.ROLE_ASSISTANT: "assistant",
}
FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


class RequestReader:
    """Turns `llm.v1.GenerateRequest` into a Request, or raises what the caller did wrong.

    `model` is the served name; None leaves the name unchecked. Reading may take as long as one rendering of the chat
    template may, and waits for it: call it from a thread, not from the event loop.
    """

    def __init__(
        self,
        limits: RequestLimits,
        defaults: GenerationDefaults,
        prompts: PromptBuilder,
        *,
        eos_ids: frozenset[int],
        context_tokens: int,
        vocab_size: int,
        model: str | None = None,
    ) -> None:
        self._limits = limits
        self._defaults = defaults
        self._prompts = prompts
        self._eos_ids = frozenset(eos_ids)
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._model = model

    def read(self, message: llm_pb2.GenerateRequest, request_id: str) -> Request:
        """The request as the engine knows it. Raises InvalidArgument, ResourceExhausted or NotFound."""
        if self._model is not None and message.model != self._model:
            raise NotFound(
                f"model: {message.model!r} is not served here, {self._model!r} is",
                field="model",
                limit=self._model,
                value=message.model,
            )
        # All cheap checks come before the prompt is built.
        sampling = read_sampling(
            message.sampling,
            limits=self._limits,
            defaults=self._defaults,
            eos_ids=self._eos_ids,
            context_tokens=self._context_tokens,
            vocab_size=self._vocab_size,
        )
        match message.WhichOneof("input"):
            case "chat":
                images, segments = self._read_chat(message.chat)
            case "completion":
                parts = _PartReader(self._limits, self._context_tokens)
                prompt_parts = parts.read(message.completion.parts, "completion.parts")
                images, segments = parts.images, self._prompts.build_completion(prompt_parts)
            case _:
                raise InvalidArgument("input: chat or completion must be set", field="input")
        # A picture takes one token at least; the engine checks again when their number is known.
        least_tokens = len(images) + sum(len(part.ids) for part in segments if isinstance(part, PromptTokens))
        if least_tokens >= self._context_tokens:
            raise InvalidArgument(
                f"the prompt has at least {least_tokens} tokens, prompt and answer may have {self._context_tokens}",
                field=message.WhichOneof("input"),
                limit=self._context_tokens,
                value=least_tokens,
                reason="CONTEXT_LENGTH",
            )
        return Request(request_id, segments, tuple(images), sampling)

    def _read_chat(self, chat: common_pb2.Chat) -> tuple[list[ImageInput], tuple[PromptSegment, ...]]:
        check_size("chat.messages", "messages", len(chat.messages), self._limits.max_messages)
        parts = _PartReader(self._limits, self._context_tokens)
        messages = []
        for index, turn in enumerate(chat.messages):
            field = f"chat.messages[{index}]"
            if turn.role not in ROLES:
                raise InvalidArgument(
                    f"{field}.role must be one of {sorted(ROLES)} (system, user, assistant), got {turn.role}",
                    field=f"{field}.role",
                    limit=sorted(ROLES),
                    value=turn.role,
                )
            if not turn.parts:
                raise InvalidArgument(
                    f"{field}.parts: at least 1 part is needed, got 0", field=f"{field}.parts", limit=1, value=0
                )
            messages.append(ChatMessage(ROLES[turn.role], tuple(parts.read(turn.parts, f"{field}.parts"))))
        return parts.images, self._prompts.build_chat(messages)


class _PartReader:
    """Reads the parts of one request, counting against its limits over all of them."""

    def __init__(self, limits: RequestLimits, context_tokens: int) -> None:
        self.images: list[ImageInput] = []
        self._limits = limits
        self._context_tokens = context_tokens
        self._parts = 0
        self._text_bytes = 0
        self._image_bytes = 0
        self._token_ids = 0

    def read(self, parts: Sequence[common_pb2.Part], field: str) -> list[PromptPart]:
        self._parts += len(parts)
        check_size(field, "parts in a request", self._parts, self._limits.max_parts)
        return [self._read_part(part, f"{field}[{index}]") for index, part in enumerate(parts)]

    def _read_part(self, part: common_pb2.Part, field: str) -> PromptPart:
        match part.WhichOneof("content"):
            case "text":
                self._text_bytes += len(part.text.encode())
                check_size(f"{field}.text", "bytes of text in a request", self._text_bytes, self._limits.max_text_bytes)
                return TextPart(part.text)
            case "image":
                self._read_image(part.image, f"{field}.image")
                return ImagePart()
            case "token_ids":
                self._token_ids += len(part.token_ids.ids)
                if self._token_ids >= self._context_tokens:
                    raise InvalidArgument(
                        f"{field}.token_ids: {self._token_ids} ids do not fit a context of {self._context_tokens}",
                        field=f"{field}.token_ids",
                        limit=self._context_tokens,
                        value=self._token_ids,
                        reason="CONTEXT_LENGTH",
                    )
                return TokenIdsPart(tuple(part.token_ids.ids))
            case _:
                raise InvalidArgument(f"{field}: text, image or token_ids must be set", field=field)

    def _read_image(self, image: common_pb2.Image, field: str) -> None:
        if image.WhichOneof("source") == "url":
            raise InvalidArgument(
                f"{field}.url: the language service takes image bytes only; the router resolves URLs",
                field=f"{field}.url",
            )
        if not image.data:
            raise InvalidArgument(
                f"{field}.data: at least 1 byte is needed, got 0", field=f"{field}.data", limit=1, value=0
            )
        check_size(f"{field}.label", "bytes", len(image.label.encode()), self._limits.max_label_bytes)
        self._image_bytes += len(image.data)
        check_size(f"{field}.data", "image bytes in a request", self._image_bytes, self._limits.max_image_bytes)
        self.images.append(ImageInput(len(self.images), image.data, image.label))
        check_size(field, "images in a request", len(self.images), self._limits.max_images)


def write_accepted(request_id: str) -> llm_pb2.GenerateResponse:
    """The event that opens every stream."""
    return llm_pb2.GenerateResponse(accepted=common_pb2.Accepted(request_id=request_id))


def write_delta(
    choice: int,
    text: str,
    tokens: Sequence[SampledToken],
    token_bytes: Callable[[int], bytes] | None = None,
) -> llm_pb2.GenerateResponse:
    """New output of one choice; with log-probabilities when `token_bytes`, the tokens' spelling, is given."""
    delta = common_pb2.Delta(choice=choice, text=text, token_ids=[token.token_id for token in tokens])
    if token_bytes is not None:
        for token in tokens:
            delta.logprobs.append(
                common_pb2.PositionLogprobs(
                    chosen=_logprob(token.token_id, token.logprob, token_bytes),
                    top=[_logprob(other.token_id, other.logprob, token_bytes) for other in token.top],
                )
            )
    return llm_pb2.GenerateResponse(delta=delta)


def write_finished(choice: int, reason: FinishReason, stop: str | None = None) -> llm_pb2.GenerateResponse:
    """The end of one choice; `stop` is the stop string that ended it, when one did."""
    assert reason in FINISH_REASONS, f"{reason} ends a stream by its status, not as a finish"
    finished = common_pb2.ChoiceFinished(choice=choice, reason=FINISH_REASONS[reason], stop=stop or "")
    return llm_pb2.GenerateResponse(finished=finished)


def write_usage(
    *, prompt_tokens: int, cached_tokens: int, visual_tokens: int, completion_tokens: int
) -> llm_pb2.GenerateResponse:
    """The event that closes every finished stream."""
    return llm_pb2.GenerateResponse(
        usage=common_pb2.Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            visual_tokens=visual_tokens,
            completion_tokens=completion_tokens,
        )
    )


def _logprob(token_id: int, logprob: float, token_bytes: Callable[[int], bytes]) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, token_bytes=token_bytes(token_id))
