"""Shows a benchmark's figures on a terminal; knows no service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from day0.bench.load import Outcome
from day0.bench.summary import LATENCIES
from day0.terminal import printable

_ROWS = (
    ("completed", "Successful requests"),
    ("failed", "Failed requests"),
    ("max_concurrency", "Maximum request concurrency"),
    ("request_rate", "Request rate configured (RPS)"),
    ("duration", "Benchmark duration (s)"),
    ("total_input_tokens", "Total input tokens"),
    ("total_visual_tokens", "  of them from images"),
    ("total_cached_tokens", "  of them from the prefix cache"),
    ("total_output_tokens", "Total generated tokens"),
    ("request_throughput", "Request throughput (req/s)"),
    ("request_goodput", "Request goodput (req/s)"),
    ("output_throughput", "Output token throughput (tok/s)"),
    ("total_token_throughput", "Total token throughput (tok/s)"),
)


def result_table(result: Mapping[str, Any], percentiles: Sequence[float]) -> Table:
    """The figures in the order and words of `vllm bench serve`."""
    table = Table(title="Serving Benchmark Result", show_header=False, min_width=56)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, words in _ROWS:
        if result.get(key) is not None:
            table.add_row(words, _shown(result[key]))
    for name, words in LATENCIES.items():
        table.add_section()
        table.add_row(f"[bold]{words}[/bold]", "")
        kinds = [("mean", "Mean"), ("median", "Median"), *((f"p{p:g}", f"P{p:g}") for p in percentiles)]
        for key, word in kinds:
            table.add_row(f"{word} {name.upper()} (ms)", _shown(result[f"{key}_{name}_ms"]))
    return table


def show_errors(outcomes: Sequence[Outcome], console: Console, *, most: int = 5) -> None:
    """The commonest errors with their counts."""
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    for error, count in errors.most_common(most):
        console.print(f"{count} failed: {printable(error)}", style="red", markup=False, highlight=False)
    if len(errors) > most:
        console.print(f"and {len(errors) - most} other errors", style="red")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
