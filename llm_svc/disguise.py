"""Hides what spells a control token in a user's text while a template works on it; knows no tokenizer.

Every character of such a spelling is replaced by a private-use character that no text of the request contains, and put
back after rendering. A template may trim, split or cut the text as it likes: no control token can come out of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class TextNotEncodable(ValueError):
    """The text cannot be encoded without making a control token."""


class Disguise:
    """One request's stand-ins. `texts` are all texts that a rendered prompt can contain, the template's source too."""

    def __init__(self, texts: Iterable[str]) -> None:
        used: set[str] = set().union(*map(set, texts))
        self._free: Iterator[str] = (char for codes in PRIVATE_USE for char in map(chr, codes) if char not in used)
        self._hidden: dict[str, str] = {}
        self._spellings: dict[str, str] = {}
        self.start = self._take()
        self.end = self._take()
        self._shown: dict[int, str | None] = {ord(self.start): None, ord(self.end): None}
        self._private = {self.start, self.end}

    def hide(self, text: str) -> str:
        """`text` in stand-ins, as long as it was."""
        hidden = self._spellings.get(text)
        if hidden is None:
            hidden = "".join(self._hidden.get(char) or self._hide_new(char) for char in text)
            self._spellings[text] = hidden
        return hidden

    def reveal(self, text: str) -> str:
        """The text behind stand-ins; the two marks vanish."""
        return text.translate(self._shown)

    def touches(self, text: str) -> bool:
        """Whether there is a stand-in or a mark in `text`."""
        return not self._private.isdisjoint(text)

    def _hide_new(self, char: str) -> str:
        private = self._hidden[char] = self._take()
        self._shown[ord(private)] = char
        self._private.add(private)
        return private

    def _take(self) -> str:
        try:
            return next(self._free)
        except StopIteration:
            raise TextNotEncodable("the text leaves no private-use character free") from None


class Spellings:
    """Finds, in a user's text, control tokens and the edges that may be a part of one; letter case does not matter.

    `searched` are the control tokens that the template looks for in messages (`'</think>' in content`). Those are not
    hidden but put between two marks, so that it finds them; what is left beside a mark is hidden after rendering.
    """

    def __init__(self, tokens: Sequence[str], searched: Collection[str] = ()) -> None:
        self._pattern = _any_of(tokens)
        self._searched = _any_of(searched)
        folded = {token.lower() for token in tokens}
        self._longest = max(map(len, folded), default=0)
        self._heads = {token[:size] for token in folded for size in range(1, len(token))}
        self._tails = {token[-size:] for token in folded for size in range(1, len(token))}
        self._joined = "\0".join(folded)

    def cover(self, text: str, disguise: Disguise) -> str:
        """`text` as the template may see it."""
        pieces, done = [], 0
        for start, end in self.find(text):
            spelling = text[start:end]
            if self._searched.fullmatch(spelling):
                spelling = disguise.start + spelling + disguise.end
            else:
                spelling = disguise.hide(spelling)
            pieces += [text[done:start], spelling]
            done = end
        return "".join([*pieces, text[done:]])

    def settle(self, rendered: str, disguise: Disguise) -> str:
        """Hides what still stands beside a mark in a rendered text; a template may have cut a pair of marks apart."""
        if disguise.start not in rendered and disguise.end not in rendered:
            return rendered
        for pattern in (
            f"(?<={disguise.start})(?:{self._searched.pattern})",
            f"(?:{self._searched.pattern})(?={disguise.end})",
        ):
            rendered = re.sub(pattern, lambda match: disguise.hide(match[0]), rendered)
        return rendered

    def find(self, text: str) -> list[tuple[int, int]]:
        """Spans [start, end) in order, none overlapping another; each control token has a span of its own."""
        if not text:
            return []
        spans = [match.span() for match in self._pattern.finditer(text)]
        # A text may be joined to its neighbours: its ends, or all of it, may be a part of a control token.
        if len(text) < self._longest and text.lower() in self._joined:
            return [(0, len(text))]
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[:size].lower() in self._tails:
                spans.append((0, size))
                break
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:].lower() in self._heads:
                spans.append((len(text) - size, len(text)))
                break
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Matches any of `tokens`, the longest first; nothing when there is none.

    The tokens are written as a tree of their beginnings, so that a search does not try a thousand of them at a place.
    """
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        chain = ""
        while len(node) == 1 and "" not in node:
            ((char, node),) = node.items()
            chain += re.escape(char)
        branches = [re.escape(char) + write(inner) for char, inner in sorted(node.items()) if char]
        if not branches:
            return chain
        return chain + f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")

    return re.compile(write(tree) if tree else r"(?!)", re.IGNORECASE)
