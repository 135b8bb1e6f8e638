"""`day0 align`: compares with upstream and shows the verdict of every tap; computes nothing itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from day0.align.alignment import Alignment, Passage, align
from day0.align.tap import Comparison, Verdict
from day0.inventory.document import markdown_table
from day0.inventory.quiet import quiet
from day0.tiny import quiet as no_progress_bar

_HEAD = ("way", "tap", "operator", "layers", "compared", "error", "allowed", "verdict")
_SEVERITY = list(Verdict)


def run_align(
    folder: Path,
    console: Console,
    *,
    dtype: str,
    with_kernels: bool,
    every_tap: bool,
    markdown: Path | None,
    as_json: bool,
) -> bool:
    """Whether the two agree. Raises AlignError and CheckpointError."""
    with quiet(), no_progress_bar(), _progress(as_json) as progress:
        running = progress.add_task("", total=None)
        found = align(
            folder,
            dtype,
            accelerators_allowed=with_kernels,
            told=lambda what: progress.update(running, description=what),
        )
    if markdown is not None:
        markdown.write_text(to_markdown(found))
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        for table in _tables(found, every_tap):
            console.print(table)
        console.print(conclusion(found), highlight=False)
    return found.culprit is None


def _progress(silent: bool) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=silent, transient=True)


def conclusion(found: Alignment) -> str:
    """The verdict in words."""
    versions = ", ".join(f"{name} {version}" for name, version in found.environment.versions.items())
    kernels = ", ".join(found.environment.accelerators) or "none of fla and causal_conv1d"
    around = f"{found.model} in {found.dtype}; {versions}; upstream's kernels: {kernels}."
    culprit = found.culprit
    if culprit is None:
        ties = sum(c.verdict is Verdict.TIE and not c.follows_tie for p in found.passages for c in p.comparisons)
        return f"Aligned: no operator differs; {ties} choices between equal scores. {around}"
    where = "outside the layers" if culprit.layer is None else f"layer {culprit.layer}"
    why = f"; {culprit.note}" if culprit.note else ""
    return (
        f"Diverges first at {culprit.operator} ({culprit.tap}, {where}): off by {culprit.error:.2g} of the largest "
        f"value, allowed {culprit.tolerance:.2g}{why}. {around}"
    )


def to_json(found: Alignment) -> dict[str, Any]:
    """Each tap of each way with its worst comparison."""
    culprit = found.culprit
    return {
        "model": found.model,
        "dtype": found.dtype,
        "versions": found.environment.versions,
        "upstream_kernels": list(found.environment.accelerators),
        "aligned": culprit is None,
        "first_divergence": None if culprit is None else _comparison(culprit),
        "passages": [
            {
                "case": passage.case,
                "inputs": "upstream's" if passage.forced else "its own",
                "tokens": passage.tokens,
                "forwards": passage.forwards,
                "taps": [{**_comparison(worst), "compared": len(group)} for worst, group in _grouped(passage)],
            }
            for passage in found.passages
        ],
    }


def to_markdown(found: Alignment) -> str:
    """All taps in one table."""
    rows = [cells for passage in found.passages for cells in _rows(passage)]
    return f"# Alignment of {found.model} with upstream\n\n{conclusion(found)}\n\n{markdown_table(_HEAD, rows)}\n"


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "tap": found.tap,
        "operator": found.operator,
        "layer": found.layer,
        "verdict": found.verdict.value,
        "error": found.error,
        "tolerance": found.tolerance,
        "note": found.note,
    }


def _grouped(passage: Passage) -> Iterator[tuple[Comparison, list[Comparison]]]:
    """Comparisons of one tap in the order of the computation, and the worst of them, the first among equals."""
    groups: dict[str, list[Comparison]] = {}
    for found in passage.comparisons:
        groups.setdefault(found.tap, []).append(found)
    for group in groups.values():
        yield max(group, key=lambda c: (_SEVERITY.index(c.verdict), _share(c))), group


def _share(found: Comparison) -> float:
    return found.error / found.tolerance if found.tolerance else found.error


def _rows(passage: Passage) -> Iterator[tuple[str, ...]]:
    way = f"{passage.case}, {'by operator' if passage.forced else 'end to end'}"
    for worst, group in _grouped(passage):
        layers = len({found.layer for found in group})
        yield (
            way,
            worst.tap,
            worst.operator,
            "-" if worst.layer is None else str(layers),
            str(len(group)),
            f"{worst.error:.1e}",
            f"{worst.tolerance:.1e}",
            worst.verdict.value,
        )


_COLOURS = {Verdict.DIVERGES: "red", Verdict.UNSEEN: "red", Verdict.TIE: "yellow"}


def _tables(found: Alignment, every_tap: bool) -> Iterator[Table]:
    """One line a way; then a table of each way's taps: all, or those that do not agree."""
    table = _new_table(
        f"{found.model} against upstream, {found.dtype}", ("way", "comparisons", "worst tap", *_HEAD[5:])
    )
    for passage in found.passages:
        worst = max((w for w, _ in _grouped(passage)), key=lambda w: (_SEVERITY.index(w.verdict), _share(w)))
        cells = next(cells for cells in _rows(passage) if cells[1] == worst.tap)
        row = (cells[0], str(len(passage.comparisons)), worst.tap, *cells[5:])
        table.add_row(*row, style=_COLOURS.get(worst.verdict))
    yield table
    for passage in found.passages:
        rows = [
            (worst.verdict, cells)
            for (worst, _), cells in zip(_grouped(passage), _rows(passage), strict=True)
            if every_tap or not worst.verdict.passes
        ]
        if rows:
            table = _new_table(rows[0][1][0], _HEAD[1:])
            for verdict, cells in rows:
                table.add_row(*cells[1:], style=_COLOURS.get(verdict))
            yield table


def _new_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in ("comparisons", *_HEAD[3:7]) else "left")
    return table
