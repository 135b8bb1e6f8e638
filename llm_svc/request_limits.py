"""The caps on one request, and how a value outside its range is reported; knows no fields of its own."""

from __future__ import annotations

from dataclasses import dataclass

from svc_common.errors import InvalidArgument, ResourceExhausted


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The most one request may ask for. All of it is checked before any work is done."""

    max_messages: int = 1024
    max_parts: int = 4096
    max_text_bytes: int = 8 << 20
    max_images: int = 32
    max_image_bytes: int = 48 << 20
    max_label_bytes: int = 1024
    max_tokens: int = 1 << 17
    max_choices: int = 16
    max_total_tokens: int = 1 << 18
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_bytes: int = 1024
    max_stop_token_ids: int = 256
    max_logit_biases: int = 1024


def check_range(
    field: str, value: float, low: float, high: float, *, low_open: bool = False, reason: str = "OUT_OF_RANGE"
) -> None:
    """Raises InvalidArgument unless `low <= value <= high` (`low < value` with `low_open`), so also for NaN."""
    if low <= value <= high and not (low_open and value == low):
        return
    limit = f"{'(' if low_open else '['}{low}, {high}]"
    raise InvalidArgument(
        f"{field} must be in {limit}, got {value}", field=field, limit=limit, value=value, reason=reason
    )


def check_size(field: str, what: str, value: int, limit: int, *, reason: str = "TOO_LARGE") -> None:
    """Raises ResourceExhausted when there is more of something than one request may bring."""
    if value > limit:
        raise ResourceExhausted(
            f"{field}: at most {limit} {what}, got {value}", field=field, limit=limit, value=value, reason=reason
        )
