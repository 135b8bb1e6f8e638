"""Keeps encoded images by digest within a byte budget, least recently used first out; knows no service."""

from __future__ import annotations

from collections import OrderedDict

from vision_svc.encoder import VisualTokens


class TokenCache:
    """Least-recently-used store of visual tokens. Not thread-safe: it lives on the event loop."""

    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes` bounds the token bytes held; 0 keeps nothing."""
        assert budget_bytes >= 0
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[bytes, VisualTokens] = OrderedDict()
        self._held_bytes = 0

    def get(self, digest: bytes) -> VisualTokens | None:
        """The tokens of `digest`, which becomes the most recently used, or None."""
        entry = self._entries.get(digest)
        if entry is not None:
            self._entries.move_to_end(digest)
        return entry

    def put(self, digest: bytes, tokens: VisualTokens) -> None:
        """Stores `tokens`, dropping the least recently used above the budget; one larger than all of it is not kept."""
        if len(tokens.data) > self._budget_bytes:
            return
        earlier = self._entries.pop(digest, None)
        if earlier is not None:
            self._held_bytes -= len(earlier.data)
        self._entries[digest] = tokens
        self._held_bytes += len(tokens.data)
        while self._held_bytes > self._budget_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._held_bytes -= len(oldest.data)

    @property
    def images(self) -> int:
        """Number of images held."""
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Token bytes held."""
        return self._held_bytes
