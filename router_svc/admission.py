"""Decides whether a request may come in: its size, its deadline, and how much is already here; knows no replica.

Ranges of sampling values are the language service's to judge; here stands only what would cost before it is judged.
Too much of anything is RESOURCE_EXHAUSTED, by the same rule as in the language service.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2
from router_svc.images import parts_of
from router_svc.settings import RouterSettings
from svc_common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted


class Admission:
    """The router's own count of what is in flight, and its limits."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.in_flight_requests = 0
        self.in_flight_bytes = 0

    @contextlib.contextmanager
    def admitted(self, size_bytes: int) -> Iterator[None]:
        """Holds a place for one request of `size_bytes`; ResourceExhausted when there is none."""
        settings = self._settings
        requests, held_bytes = self.in_flight_requests + 1, self.in_flight_bytes + size_bytes
        _within("requests in flight", requests, settings.max_inflight_requests, "max_inflight_requests")
        _within("bytes in flight", held_bytes, settings.max_inflight_bytes, "max_inflight_bytes")
        self.in_flight_requests += 1
        self.in_flight_bytes += size_bytes
        try:
            yield
        finally:
            self.in_flight_requests -= 1
            self.in_flight_bytes -= size_bytes

    def deadline_seconds(self, remaining_seconds: float | None) -> float:
        """Time the request may take: what the caller grants, at most the limit; DeadlineExceeded when it is over."""
        if remaining_seconds is None:
            return self._settings.default_deadline_seconds
        if remaining_seconds <= 0:
            raise DeadlineExceeded(
                "the deadline was over before the request was started", value=remaining_seconds, reason="DEADLINE_OVER"
            )
        return min(remaining_seconds, self._settings.max_deadline_seconds)

    def check_load(self, least_queued_tokens: int) -> None:
        """Sheds the request when even the least loaded replica has too much token-work waiting."""
        limit = self._settings.max_queued_tokens
        _within("queued tokens at the least loaded replica", least_queued_tokens, limit, "max_queued_tokens")

    def check_request(self, request: router_pb2.GenerateRequest) -> None:
        """Refuses what is too large to be worth looking at; see the module for the statuses."""
        settings = self._settings
        if request.WhichOneof("input") is None:
            raise InvalidArgument("neither chat nor completion is set", field="input", reason="INPUT_MISSING")
        _within("chat.messages", len(request.chat.messages), settings.max_messages, "max_messages")
        parts = images = text_bytes = token_ids = 0
        for path, part in parts_of(request):
            parts += 1
            kind = part.WhichOneof("content")
            if kind == "text":
                text_bytes += len(part.text.encode())
            elif kind == "image":
                images += 1
                _within(
                    f"{path}.image.label bytes",
                    len(part.image.label.encode()),
                    settings.max_label_bytes,
                    "max_label_bytes",
                )
            elif kind == "token_ids":
                token_ids += len(part.token_ids.ids)
            else:
                raise InvalidArgument(f"{path}: no content is set", field=path, reason="PART_EMPTY")
        _within("parts", parts, settings.max_parts, "max_parts")
        _within("images", images, settings.max_images, "max_images")
        _within("bytes of text", text_bytes, settings.max_text_bytes, "max_text_bytes")
        _within("prompt token_ids", token_ids, settings.max_prompt_token_ids, "max_prompt_token_ids")
        self._check_sampling(request.sampling)

    def _check_sampling(self, sampling: common_pb2.SamplingParams) -> None:
        settings = self._settings
        _within("sampling.stop", len(sampling.stop), settings.max_stop_strings, "max_stop_strings")
        for index, stop in enumerate(sampling.stop):
            _within(f"sampling.stop[{index}] bytes", len(stop.encode()), settings.max_stop_bytes, "max_stop_bytes")
        count = len(sampling.stop_token_ids)
        _within("sampling.stop_token_ids", count, settings.max_stop_token_ids, "max_stop_token_ids")
        _within("sampling.logit_bias", len(sampling.logit_bias), settings.max_logit_bias, "max_logit_bias")
        if sampling.logprobs > settings.max_logprobs:
            # A value out of its range rather than a size.
            raise InvalidArgument(
                f"sampling.logprobs: {sampling.logprobs} is more than max_logprobs {settings.max_logprobs}",
                field="sampling.logprobs",
                limit=settings.max_logprobs,
                value=sampling.logprobs,
                reason="MAX_LOGPROBS",
            )
        _within("sampling.n", sampling.n, settings.max_choices, "max_choices")
        answer_tokens = max(sampling.n, 1) * sampling.max_tokens
        limit = settings.max_answer_tokens
        _within("sampling.n * sampling.max_tokens", answer_tokens, limit, "max_answer_tokens")


def _within(field: str, value: int, limit: int, setting: str) -> None:
    if value > limit:
        message = f"{field}: {value} is more than {setting} {limit}"
        raise ResourceExhausted(message, field=field, limit=limit, value=value, reason=setting.upper())
