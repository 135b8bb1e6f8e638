"""Stop strings over a stream of text; knows no tokens and no requests."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string to be completed and lets out only text that no stop string can still claim.

    Each stop string is a Knuth-Morris-Pratt automaton that is fed character by character, so the answer does not
    depend on how the text was cut, and the cost is linear in it. Of several that end at the same character the longest
    wins, so the text is cut before all of them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched_chars = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next text; gives what may go out and the stop string that ended it, if any. Nothing follows one."""
        if not self._stops:
            return text, None
        states = self._matched_chars
        text_all = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            hit: str | None = None
            for index, stop in enumerate(self._stops):
                state = states[index]
                while state and stop[state] != char:
                    state = self._failures[index][state]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    if hit is None or len(stop) > len(hit):
                        hit = stop
                    state = 0
                states[index] = state
            if hit is not None:
                self._held = ""
                return text_all[: position - len(hit)], hit
        held_chars = max(states)
        cut = len(text_all) - held_chars
        self._held = text_all[cut:]
        return text_all[:cut], None

    def flush(self) -> str:
        """The held text, when nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        self._matched_chars = [0] * len(self._stops)
        return held


def _failure_table(stop: str) -> list[int]:
    """Entry n: length of the longest proper prefix of `stop` that ends `stop[:n]` (Knuth, Morris, Pratt 1977)."""
    table = [0] * (len(stop) + 1)
    state = 0
    for position in range(1, len(stop)):
        while state and stop[state] != stop[position]:
            state = table[state]
        if stop[state] == stop[position]:
            state += 1
        table[position + 1] = state
    return table
