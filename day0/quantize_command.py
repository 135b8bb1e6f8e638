"""What `day0 quantize` shows: a bar while it runs, then the report; it knows no weights."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

from day0.quantize import QuantizeReport, quantize_checkpoint


def quantize(source: Path, destination: Path, out: Console, bar: Console, *, as_json: bool) -> None:
    """Quantises `source` into `destination`, a progress bar on `bar`, the report on `out`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=bar, disable=as_json) as progress:
        shown = progress.add_task("MXFP4", total=None)
        report = quantize_checkpoint(
            source, destination, progress=lambda done, total: progress.update(shown, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(report.as_dict()))
        return
    out.print(_table(report))
    before, after = report.bytes_before, report.bytes_after
    out.print(f"{escape(str(destination))}: {before:,} bytes before, {after:,} after ({before / after:.2f}x smaller)")


def _table(report: QuantizeReport) -> Table:
    table = Table(Column("layer", overflow="fold"), "experts", "relative error", "bytes before", "bytes after")
    for prefix, layer in sorted(report.layers.items()):
        errors = layer.errors
        figures = (f"{layer.relative_error:.4f}", f"{errors.bytes_before:,}", f"{errors.bytes_after:,}")
        table.add_row(escape(prefix), str(layer.experts), *figures)
    return table
