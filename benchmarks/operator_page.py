"""Writes the table of docs/bench/operators.md from the JSON files of `day0 bench ops` and of `make test-gpu`.

    PYTHONPATH=.:kernels python -m benchmarks.operator_page FILE...

What stands between the two marks of the page is written anew; the rest is prose and stays. A peer is compared with our
time in its own file, since machines differ; our line is of the first file that has it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.operator_goals import Bound, Goal, goal_of
from day0.bench.ops.row import Row, from_json, times_as_fast

PAGE = Path(__file__).resolve().parents[1] / "docs" / "bench" / "operators.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_HEAD = (
    "operator",
    "shape",
    "µs",
    "floor µs",
    "binds",
    "of floor",
    "TFLOP/s",
    "error",
    "must",
    "aim",
    "peers, same run",
)


@dataclass(frozen=True, slots=True)
class Sight:
    """Our row in one file, and its peers there."""

    ours: Row
    peers: tuple[Row, ...]


def sights(documents: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Sight]]:
    """By operator and shape, in the order of their first appearance, one for each file that has it."""
    found: dict[tuple[str, str], list[Sight]] = {}
    for document in documents:
        rows = [from_json(row) for row in document["rows"]]
        for ours in (row for row in rows if row.ours):
            key = (ours.operator, ours.shape)
            peers = tuple(row for row in rows if not row.ours and (row.operator, row.shape) == key)
            found.setdefault(key, []).append(Sight(ours, peers))
    return found


def verdict(bounds: Sequence[Bound], seen: Sequence[Sight]) -> str:
    """The conditions and what became of them in the first file that can say."""
    said = []
    for bound in bounds:
        answers = (bound.reached(sight.ours, sight.peers) for sight in seen)
        answer = next((answer for answer in answers if answer is not None), None)
        said.append(f"{bound}: {'no peer' if answer is None else '**yes**' if answer else 'no'}")
    return "<br>".join(said)


def peers_text(seen: Sequence[Sight]) -> str:
    """Each peer with its time and our ratio, or why it has none; the first file that timed it counts.

    A peer that was timed in one version is not also listed as untimed in another.
    """
    lines: dict[str, str] = {}
    for sight in seen:
        for peer in sight.peers:
            name = _without_version(peer.who)
            times = times_as_fast(sight.ours, peer)
            note = f", {peer.note}" if peer.note else ""
            if peer.us is not None:
                ratio = "" if times is None else f" ({times:.2f}x{note})"
                if "µs" not in lines.get(name, ""):
                    lines[name] = f"{peer.who}: {peer.us:,.1f} µs{ratio}"
            else:
                lines.setdefault(name, f"{peer.who}: {(peer.wrong or 'not timed')[:80]}")
    return "<br>".join(line.replace("|", "\\|") for line in lines.values())


def _without_version(who: str) -> str:
    """`package version call` as `package call`."""
    package, _, rest = who.partition(" ")
    return f"{package} {rest.partition(' ')[2]}"


def cells(seen: Sequence[Sight]) -> list[str]:
    """One line of the table."""
    ours, goal = seen[0].ours, goal_of(seen[0].ours)
    if ours.us is None or ours.share is None:
        figures = [(ours.wrong or "not timed").replace("|", "\\|"), *[""] * 4]
    else:
        tflops = "" if ours.tflops is None else f"{ours.tflops:,.0f}"
        figures = [f"{ours.us:,.1f}", f"{ours.floor_us:,.1f}", ours.binds, f"{ours.share:.0f} %", tflops]
    error = "" if ours.error is None else f"{ours.error:.1e}"
    return [ours.operator, ours.shape, *figures, error, *_goals(goal, seen), peers_text(seen)]


def _goals(goal: Goal | None, seen: Sequence[Sight]) -> list[str]:
    return ["", ""] if goal is None else [verdict(goal.must, seen), verdict(goal.aim, seen)]


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """What stands between the marks: where it was measured, and every shape with its peers beside it."""
    lines = []
    for document in documents:
        about = ", ".join(f"{name} {value}" for name, value in document["about"].items())
        ceilings = document["ceilings"]
        lines.append(
            f"- {about}; copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
            f"read {ceilings['read_bytes_per_second'] / 1e12:.2f} TB/s, "
            f"bf16 {ceilings['bf16_flops_per_second'] / 1e12:.0f} TFLOP/s, "
            f"fp8 {ceilings['fp8_flops_per_second'] / 1e12:.0f} TFLOP/s"
        )
    lines += ["", "| " + " | ".join(_HEAD) + " |", "|---|---|" + "---:|" * 2 + "---|" + "---:|" * 3 + "---|" * 3]
    lines += ["| " + " | ".join(cells(seen)) + " |" for seen in sights(documents).values()]
    return "\n".join(lines)


def checks(document: Mapping[str, Any]) -> str:
    """What `make test-gpu` found, in a line and one more for each operator with something wrong or left over."""
    rows = document["rows"]
    right, wrong = sum(row["right"] for row in rows), sum(len(row["wrong"]) for row in rows)
    refused = sum(sum(row["refused"].values()) for row in rows)
    lines = [
        f"- `make test-gpu`, {document['device']}, torch {document['torch']}: {right:,} cases of "
        f"{len({row['operator'] for row in rows})} operators right, {wrong} wrong, {refused} refused with a reason, "
        f"{sum(row['not_reached'] for row in rows)} not reached, in {document['seconds']:.0f} s"
    ]
    begun: dict[bool, list[Mapping[str, Any]]] = {True: [], False: []}
    for row in rows:
        begun[bool(row["right"] or row["wrong"] or not row["not_reached"])].append(row)
    for row in begun[True]:
        said = [text.replace("|", "\\|") for text in row["wrong"]]
        said += [f"{row['not_reached']} cases not reached"] if row["not_reached"] else []
        if said:
            lines.append(f"  - {row['operator']}, {row['dtype']}: {'; '.join(said)}")
    for dtype in dict.fromkeys(row["dtype"] for row in begun[False]):
        names = [row["operator"] for row in begun[False] if row["dtype"] == dtype]
        lines.append(f"  - {dtype}: no case reached of {', '.join(names)}")
    return "\n".join(lines)


def rewritten(page: str, between: str) -> str:
    """The page with `between` between its marks; ValueError where it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{between}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what `day0 bench ops` or the checks wrote")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that is rewritten")
    options = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in options.files]
    between = [checks(document) for document in documents if "ceilings" not in document]
    between.append(table([document for document in documents if "ceilings" in document]))
    options.page.write_text(rewritten(options.page.read_text(), "\n".join(between)))


if __name__ == "__main__":
    main()
