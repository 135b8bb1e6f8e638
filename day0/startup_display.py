"""Shows how far each service has come while they start: bars in a terminal, lines elsewhere; asks no service."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from protos.common.v1 import common_pb2

# Where nothing can be redrawn, a line is worth printing for this much news.
LINE_PERCENT = 10
LINE_SECONDS = 10.0


class StartupDisplay:
    """One line a service, as a context manager.

    In a terminal each line is redrawn: stage, bar of bytes, rate, time left. Elsewhere a line is printed at each change
    of state, and within one after every LINE_PERCENT of the bytes or LINE_SECONDS.
    """

    def __init__(self, console: Console, names: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = clock()
        self._printed: dict[str, tuple[str, int, float]] = {}
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<8}"),
            TextColumn("{task.fields[state]:<8}", style="dim"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {name: self._bars.add_task(name, total=None, state="", figures="") for name in names}

    def __enter__(self) -> StartupDisplay:
        self._bars.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show_state(self, name: str, state: str) -> None:
        """A service is "starting" or "ready"."""
        if state == "ready":
            self._bars.update(self._tasks[name], state=state, figures="", total=1, completed=1)
        else:
            self._bars.update(self._tasks[name], state=state)
        self._print(name, state, 0, "")

    def show_progress(self, name: str, told: common_pb2.StartupProgress) -> None:
        """What a service says of its start."""
        if told.stage == "ready":
            # Its health port has the last word, which `show_state` brings.
            return
        percent, figures = 0, ""
        if told.stage == "load" and told.expected_bytes:
            percent = 100 * told.loaded_bytes // told.expected_bytes
            figures = _figures(told)
        if told.expected_bytes:
            # One more than there are: the bar is full with the last byte, and the service not ready yet.
            self._bars.update(self._tasks[name], total=told.expected_bytes + 1, completed=told.loaded_bytes)
        self._bars.update(self._tasks[name], state=told.stage, figures=figures)
        self._print(name, told.stage, percent, f" {percent} % ({figures})" if figures else "")

    def _print(self, name: str, state: str, percent: int, more: str) -> None:
        if self._console.is_terminal:
            return
        now = self._clock()
        last_state, last_percent, last_time = self._printed.get(name, ("", 0, now))
        news = percent // LINE_PERCENT > last_percent // LINE_PERCENT or now - last_time >= LINE_SECONDS
        if state != last_state or news:
            self._printed[name] = (state, percent, now)
            self._console.print(f"{name}: {state}{more} after {now - self._began:.1f} s", highlight=False)


def _figures(told: common_pb2.StartupProgress) -> str:
    parts = [f"{decimal(told.loaded_bytes)} of {decimal(told.expected_bytes)}"]
    if told.bytes_per_second > 0:
        parts.append(f"{decimal(int(told.bytes_per_second))}/s")
    if told.HasField("seconds_left"):
        parts.append(f"{told.seconds_left:.0f} s left")
    return ", ".join(parts)
