"""Stop strings over a stream: the cut, what is held back, and that chunking does not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_svc.stops import StopStrings


def stream(stops: list[str], chunks: list[str]) -> tuple[list[str], str | None]:
    """Every piece that went out, the flush last, and the stop that was met."""
    finder = StopStrings(stops)
    pieces = []
    for chunk in chunks:
        piece, matched = finder.push(chunk)
        pieces.append(piece)
        if matched is not None:
            return pieces, matched
    return [*pieces, finder.flush()], None


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """The text before the stop that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_no_stop_strings_let_everything_out_at_once() -> None:
    assert stream([], ["ab", "c"]) == (["ab", "c", ""], None)


def test_a_stop_over_a_chunk_boundary_does_not_leak_its_start() -> None:
    assert stream(["DEFGHIJ"], ["ABC", "D", "EFG", "HIJ", "K"]) == (["ABC", "", "", ""], "DEFGHIJ")


def test_a_stop_inside_one_chunk_cuts_it() -> None:
    assert stream(["DEF"], ["ABCDEFGHI"]) == (["ABC"], "DEF")


def test_held_text_goes_out_when_it_cannot_match() -> None:
    assert stream(["DEFGHIJ"], ["ABCDEF", "X"]) == (["ABC", "DEFX", ""], None)


def test_only_a_proper_prefix_of_a_stop_is_held() -> None:
    finder = StopStrings(["\n\nUser:"])
    assert finder.push("line one\n") == ("line one", None)
    assert finder.push("line two") == ("\nline two", None)


def test_held_text_goes_out_at_the_end() -> None:
    assert stream(["DEFGHIJ"], ["ABCDEF"]) == (["ABC", "DEF"], None)


@pytest.mark.parametrize("chunks", [["xabc"], ["xa", "bc"], ["x", "a", "b", "c"]])
@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_of_overlapping_stops_the_first_to_be_complete_wins(stops: list[str], chunks: list[str]) -> None:
    pieces, matched = stream(stops, chunks)
    assert ("".join(pieces), matched) == ("x", "ab")


@pytest.mark.parametrize("chunks", [["zabc"], ["za", "b", "c"]])
def test_of_stops_that_end_together_the_longest_cuts(chunks: list[str]) -> None:
    pieces, matched = stream(["bc", "abc"], chunks)
    assert ("".join(pieces), matched) == ("z", "abc")


def test_a_failed_match_may_contain_the_start_of_another() -> None:
    pieces, matched = stream(["aab"], list("aaab"))
    assert ("".join(pieces), matched) == ("a", "aab")


def test_a_stop_may_be_an_emoji_sequence() -> None:
    pieces, matched = stream(["👩‍👧"], ["hi 👩", "‍", "👧 there"])
    assert ("".join(pieces), matched) == ("hi ", "👩‍👧")


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    chunks=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_any_chunking_gives_the_same_cut_and_holds_no_more_than_needed(stops: list[str], chunks: list[str]) -> None:
    pieces, matched = stream(stops, chunks)
    expected, expected_match = by_definition(stops, "".join(chunks))
    assert ("".join(pieces), matched) == (expected, expected_match)
    if matched is None:
        sent = ""
        for count, piece in enumerate(pieces[:-1], start=1):
            sent += piece
            held = "".join(chunks[:count])[len(sent) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
