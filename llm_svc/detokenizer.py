"""Token ids to text as they come, never half a character; knows no stop strings and no requests."""

from __future__ import annotations

import codecs
import json
import re
import weakref
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes (`bytes_to_unicode` in its encoder.py), reversed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + index): byte for index, byte in enumerate(rest)}
    return table


BYTE_OF_CHAR = _byte_level_table()


class TokenSpellings:
    """What the tokens of one tokenizer spell; shared by all sequences. `tokenizer` is a Hugging Face fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        decoder = json.loads(self._backend.to_str())["decoder"]
        stages = _stages(decoder)
        self.byte_level = stages == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in stages
        self.special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._added_ids = frozenset(self._backend.get_added_tokens_decoder())
        self._bytes: dict[int, bytes] = {}

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` in one piece, special tokens spelled out."""
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def exists(self, token_id: int) -> bool:
        """Whether the tokenizer has the id; a model's padded vocabulary may be larger."""
        return self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the vocabulary lacks (`<0xE2>`)."""
        return self.byte_fallback and BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id)) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, b"" for an id the tokenizer lacks; a single token may be part of a character."""
        spelled = self._bytes.get(token_id)
        if spelled is None:
            spelled = self._bytes[token_id] = self._spell(token_id)
        return spelled

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            # The decoder takes a token with any character outside the table as it is.
            if all(char in BYTE_OF_CHAR for char in token):
                return bytes(BYTE_OF_CHAR[char] for char in token)
            return str(token).encode()
        if self.is_byte(token_id):
            match = BYTE_TOKEN.fullmatch(token)
            assert match is not None
            return bytes([int(match[1], 16)])
        if token_id in self._added_ids:
            return str(token).encode()
        # After another copy of itself, so that what a decoder strips at the start of a text is not lost.
        once, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return (twice[len(once) :] if twice.startswith(once) else once).encode()


_spellings: weakref.WeakKeyDictionary[Any, TokenSpellings] = weakref.WeakKeyDictionary()


def spellings_of(tokenizer: Any) -> TokenSpellings:
    """The one TokenSpellings of a tokenizer; the tables are large and the same for every sequence."""
    found = _spellings.get(tokenizer)
    if found is None:
        found = _spellings[tokenizer] = TokenSpellings(tokenizer)
    return found


class Detokenizer:
    """One sequence's text. All that `push` and `flush` gave together equals the full decode of the ids.

    The full decode is the tokenizer backend's, without `clean_up_tokenization_spaces`. Cost per token is bounded: only
    the tokens since the last complete character, and the run before them, are decoded again.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._spellings = tokenizer if isinstance(tokenizer, TokenSpellings) else spellings_of(tokenizer)
        self._skipped = self._spellings.special_ids if skip_special_tokens else frozenset()
        # Rust and Python replace the same invalid sequences by U+FFFD: the maximal subparts of the Unicode standard.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Takes the next id; gives the text that is complete now, which may be empty."""
        spellings = self._spellings
        if token_id in self._skipped or not spellings.exists(token_id):
            return ""
        if spellings.byte_level:
            return self._utf8.decode(spellings.token_bytes(token_id))
        if spellings.is_byte(token_id):
            # Byte tokens are decoded run by run: one invalid byte turns all of a run to U+FFFD.
            self._pending.append(token_id)
            return ""
        text = self._release()
        self._pending.append(token_id)
        return text + self._release()

    def flush(self) -> str:
        """The text of an unfinished character at the end of the sequence; nothing may be pushed afterwards."""
        if self._spellings.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._release()

    def token_bytes(self, token_id: int) -> bytes:
        """See TokenSpellings.token_bytes."""
        return self._spellings.token_bytes(token_id)

    def _release(self) -> str:
        if not self._pending:
            return ""
        before = self._spellings.decode(self._context)
        after = self._spellings.decode(self._context + self._pending)
        self._context, self._pending = self._pending[-1:], []
        return after[len(before) :]


def _stages(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [stage for inner in decoder["decoders"] for stage in _stages(inner)]
    return [decoder["type"]]
