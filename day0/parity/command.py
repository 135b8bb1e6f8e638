"""`day0 parity`: shows whether every way gives the same answers; computes nothing itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from day0.inventory.document import markdown_table
from day0.inventory.quiet import quiet
from day0.parity.ways import Parity, WayResult, Workbench, measure_parity
from day0.tiny import quiet as no_progress_bar

_HEAD = ("way", "shown by", "error", "allowed", "verdict")


def run_parity(
    folder: Path, console: Console, *, dtype: str, device: str, markdown: Path | None, as_json: bool
) -> bool:
    """Whether parity holds. Raises AlignError and CheckpointError."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = Progress(*columns, console=Console(stderr=True), disable=as_json, transient=True)
    with quiet(), no_progress_bar(), shown as progress:
        running = progress.add_task("loading", total=None)
        bench = Workbench(folder, dtype, device)
        found = measure_parity(bench, lambda what: progress.update(running, description=what))
    if markdown is not None:
        title = f"# Parity of {found.model}\n\n{conclusion(found)}"
        markdown.write_text(f"{title}\n\n{markdown_table(_HEAD, [_cells(r) for r in found.results])}\n")
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        table = Table(title="Against the whole prefill", title_justify="left", box=SIMPLE_HEAD)
        for column in _HEAD:
            table.add_column(column)
        for result in found.results:
            table.add_row(*_cells(result), style=None if result.verdict.passes else "red")
        console.print(table)
        console.print(conclusion(found), highlight=False)
    return found.holds


def to_json(found: Parity) -> dict[str, Any]:
    """All results."""
    results = [{**dataclasses.asdict(result), "verdict": result.verdict.value} for result in found.results]
    return {**dataclasses.asdict(found), "results": results, "holds": found.holds}


def conclusion(found: Parity) -> str:
    """The verdict in words."""
    wrong = list(_faults(found))
    around = f"{found.model}, {found.tier} tier, {found.dtype}, {found.prompts} prompts of {found.tokens} tokens."
    return f"Differs: {'; '.join(wrong)}. {around}" if wrong else f"Parity holds. {around}"


def _faults(found: Parity) -> Iterator[str]:
    for result in found.results:
        if not result.verdict.passes:
            yield f"{result.way} -> {result.part} ({result.note})"


def _cells(result: WayResult) -> tuple[str, ...]:
    verdict = "equal to the bit" if result.verdict.value == "equal" else result.verdict.value
    return result.way, result.proof, f"{result.error:.1e}", f"{result.tolerance:.1e}", verdict
