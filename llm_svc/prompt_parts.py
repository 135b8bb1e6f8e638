"""What a client asks in: chat turns and raw parts, before they are tokens; knows neither protos nor tokenizers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """Plain text; whatever it spells, it never becomes control or image tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The place of a picture; pictures are numbered in order over the whole request."""


@dataclass(frozen=True, slots=True)
class TokenIdsPart:
    """Ready token ids; in a completion only."""

    ids: tuple[int, ...]


PromptPart = TextPart | ImagePart | TokenIdsPart


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `role` is "system", "user" or "assistant"."""

    role: str
    parts: tuple[PromptPart, ...]
