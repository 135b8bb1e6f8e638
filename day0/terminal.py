"""What the command line shows: model text made safe, times and counts in one line; knows no service."""

from __future__ import annotations

from typing import Any

from day0.client import Answer

_SHOWN_CONTROLS = {"\n", "\t"}


def printable(text: str) -> str:
    """The text with control characters written out, so that an answer cannot drive the terminal."""
    return "".join(
        character if character in _SHOWN_CONTROLS or not _is_control(character) else f"\\x{ord(character):02x}"
        for character in text
    )


def _is_control(character: str) -> bool:
    return ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0


def figures(answer: Answer) -> dict[str, Any]:
    """Times in milliseconds, rates in tokens a second, counts in tokens; None where there is nothing to measure."""
    usage = answer.usage
    return {
        "ttft_ms": _ms(answer.ttft_seconds),
        "tpot_ms": _ms(answer.tpot_seconds),
        "e2e_ms": _ms(answer.e2e_seconds),
        "tokens_per_second": None if answer.tokens_per_second is None else round(answer.tokens_per_second, 2),
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "visual_tokens": usage.visual_tokens if usage else None,
        "cached_tokens": usage.cached_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else answer.completion_tokens,
    }


def figures_line(answer: Answer) -> str:
    """The figures for a person."""
    values = figures(answer)
    ttft = "no token" if values["ttft_ms"] is None else f"TTFT {values['ttft_ms']:.0f} ms"
    rate = "" if values["tokens_per_second"] is None else f" · {values['tokens_per_second']:.1f} tokens/s"
    prompt = (
        ""
        if answer.usage is None
        else f" · prompt {values['prompt_tokens']} tokens "
        f"(visual {values['visual_tokens']}, cached {values['cached_tokens']})"
    )
    reason = answer.reasons.get(0, "no end")
    return f"{ttft}{rate}{prompt} · answer {values['completion_tokens']} tokens, ended by {reason}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
