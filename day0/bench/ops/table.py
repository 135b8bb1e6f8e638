"""Shows operator rows on a terminal, a line as soon as it is there; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from day0.bench.ops.row import Row, times_as_fast
from day0.bench.ops.timing import Ceilings
from day0.terminal import printable

_OPERATOR, _SHAPE = 26, 40


def show_ceilings(ceilings: Ceilings, about: Mapping[str, str], console: Console) -> None:
    """What was measured on, and what floors stand on."""
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False, soft_wrap=True)
    console.print(
        f"copy {ceilings.copy_bytes_per_second / 1e12:.2f} TB/s (read and written), "
        f"read {ceilings.read_bytes_per_second / 1e12:.2f} TB/s, "
        f"bf16 {ceilings.bf16_flops_per_second / 1e12:.0f} TFLOP/s, "
        f"fp8 {ceilings.fp8_flops_per_second / 1e12:.0f} TFLOP/s",
        highlight=False,
        soft_wrap=True,
    )


def show_heading(console: Console) -> None:
    """Names of the columns."""
    words = f"{'operator':<{_OPERATOR}}{'shape':<{_SHAPE}}{'us':>10}{'floor us':>10} binds{'%':>8}{'TFLOP/s':>9}  error"
    console.print(Text(words, style="bold"), soft_wrap=True)


def line_of(row: Row, ours: Row | None = None) -> str:
    """A row as text; a peer's under ours, with how many times as fast ours is."""
    if row.ours:
        head = f"{row.operator:<{_OPERATOR}}{row.shape:<{_SHAPE}}"
    else:
        head = f"    {printable(row.who):<{_OPERATOR + _SHAPE - 4}}"
    if row.us is None:
        said = f"not timed: {printable(row.wrong)}" if row.wrong else f"right, error {row.error:.1e}"
        return f"{head}  {said}{_noted(row)}"
    tflops = "" if row.tflops is None else f"{row.tflops:.0f}"
    text = (
        f"{head}{row.us:>10.1f}{row.floor_us:>10.1f} {row.binds}{row.share:>8.1f}{tflops:>9}  {row.error:.1e}"
        f"{'' if row.mode == 'graph' else '  without a graph'}"
    )
    times = None if ours is None else times_as_fast(ours, row)
    return text + ("" if times is None else f"  ours {times:.2f}x as fast") + _noted(row)


def show(row: Row, console: Console, ours: Row | None = None) -> None:
    """Prints a row: ours plain, a peer's dim, one that is wrong red."""
    style = "red" if row.wrong else "" if row.ours else "dim"
    console.print(Text(line_of(row, ours), style=style), soft_wrap=True)


def _noted(row: Row) -> str:
    return f"  ({printable(row.note)})" if row.note else ""
