"""`day0 recall`: measures and shows the indexer's recall; computes nothing itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from day0.heldout import read_held_out
from day0.inventory.document import markdown_table
from day0.inventory.quiet import quiet
from day0.recall.measure import Recall, Recalls, measure_recall
from day0.recall.plot import write_plot
from day0.tiny import quiet as no_progress_bar

_HEAD = ("layer", "length", "queries", "chosen", "recall", "attention kept", "at best", "random choice")


def run_recall(
    folder: Path,
    text: Path | None,
    held_out: Path,
    console: Console,
    *,
    lengths: Sequence[int],
    queries: int,
    least_mass: float,
    dtype: str,
    device: str,
    plot: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> bool:
    """Whether every layer keeps at least `least_mass`. Raises AlignError, CheckpointError and HeldOutError."""
    if plot is not None:
        # Said before the measuring, where it is not installed.
        import matplotlib  # noqa: F401
    words, described = (text.read_text(), str(text)) if text is not None else (_held_out_text(held_out), held_out.name)
    with (
        quiet(),
        no_progress_bar(),
        Progress(console=Console(stderr=True), disable=as_json, transient=True) as progress,
    ):
        running = progress.add_task("tokens", total=max(lengths))
        found = measure_recall(
            folder,
            words,
            described,
            lengths,
            queries=queries,
            dtype=dtype,
            device=device,
            told=lambda tokens: progress.update(running, completed=tokens),
        )
    if plot is not None:
        write_plot(found, plot)
    if markdown is not None:
        title = f"# Recall of the indexer of {found.model}\n\nText: {found.text}; {found.dtype}."
        markdown.write_text(f"{title}\n\n{markdown_table(_HEAD, [_cells(r) for r in found.recalls])}\n")
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        console.print(_table(found))
        console.print(
            f"{found.model}, {found.text}, {found.dtype}. The oracle is dense attention over the same latents, mean of "
            "all heads; layers before it attend to what they chose.",
            highlight=False,
        )
    return all(recall.mass >= least_mass for recall in found.recalls)


def _held_out_text(path: Path) -> str:
    """The longest texts of the set one after the other."""
    examples = read_held_out(path).examples
    texts = [
        part.text for example in examples for message in example.chat.messages for part in message.parts if part.text
    ]
    return "\n".join(sorted(texts, key=len, reverse=True)[:8])


def _table(found: Recalls) -> Table:
    table = Table(title="The indexer's choice against dense attention", title_justify="left", box=SIMPLE_HEAD)
    for column in _HEAD:
        table.add_column(column, justify="right")
    for recall in found.recalls:
        table.add_row(*_cells(recall))
    return table


def _cells(recall: Recall) -> tuple[str, ...]:
    return (
        str(recall.layer),
        f"{recall.length_tokens:,}",
        str(recall.queries),
        f"{recall.chosen:.0f}",
        *(f"{value:.1%}" for value in (recall.recall, recall.mass, recall.best_mass, recall.chance)),
    )
