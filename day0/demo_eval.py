"""`day0 demo-eval`: asks a running router the questions of a held-out set and counts right answers."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from day0.client import Answer, RouterClient
from day0.embedded import embedded_model
from day0.heldout import Example, HeldOutSet, Task
from day0.plan import ServeOptions, make_plans
from day0.serve import running
from day0.stack import Stack
from day0.terminal import printable
from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2

# The longest right answer copies a string of about a hundred tokens.
MAX_ANSWER_TOKENS = 256
REQUEST_SECONDS = 600.0


@dataclass(slots=True)
class Score:
    """What came back for one task; `wrong` has the right and the given answer of each miss."""

    task: Task
    right: int = 0
    asked: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Right answers of those asked, 0 to 1."""
        return self.right / self.asked if self.asked else 0.0

    @property
    def reached(self) -> bool:
        """Whether the share is what the task is held to."""
        return self.task.must_reach is None or self.share >= self.task.must_reach


async def evaluate(
    target: str, held_out: HeldOutSet, *, concurrency: int, on_answer: Callable[[], None] = lambda: None
) -> list[Score]:
    """Asks every question once, greedily, at most `concurrency` at a time; an answer is right when it is the sentence.

    Raises ServiceError when a request fails: a score over part of the questions would mean nothing.
    """
    scores = {task.name: Score(task) for task in held_out.tasks}
    waiting = iter(held_out.examples)

    async def ask_in_turn(client: RouterClient) -> None:
        for example in waiting:
            given = (await _ask(client, example)).text.strip()
            score = scores[example.task]
            score.asked += 1
            if given == example.answer:
                score.right += 1
            else:
                score.wrong.append((example.answer, given))
            on_answer()

    async with RouterClient(target) as client:
        workers = [asyncio.ensure_future(ask_in_turn(client)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return list(scores.values())


async def _ask(client: RouterClient, example: Example) -> Answer:
    request = router_pb2.GenerateRequest(
        chat=example.chat, sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    )
    return await client.ask(request, timeout_seconds=REQUEST_SECONDS)


async def run_demo_eval(
    environ: Mapping[str, str],
    held_out: HeldOutSet,
    console: Console,
    *,
    target: str | None,
    concurrency: int,
    show_wrong: int,
    as_json: bool,
) -> bool:
    """As `demo_eval`, on the router at `target`; without one, on services that are started for it and stopped after.

    Raises CancelledError after a SIGTERM, when all is stopped.
    """
    if target is not None:
        return await demo_eval(
            target, held_out, console, concurrency=concurrency, show_wrong=show_wrong, as_json=as_json
        )
    task = asyncio.current_task()
    assert task is not None
    # The services are children of this process and would outlive it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="day0-demo-eval-") as logs:
        stack = Stack(make_plans(ServeOptions(model=str(embedded_model()), port=0)), Path(logs), environ)
        async with running(stack, console):
            assert stack.router_target is not None
            return await demo_eval(
                stack.router_target,
                held_out,
                console,
                concurrency=concurrency,
                show_wrong=show_wrong,
                as_json=as_json,
            )


async def demo_eval(
    target: str, held_out: HeldOutSet, console: Console, *, concurrency: int, show_wrong: int, as_json: bool
) -> bool:
    """Evaluates, prints the table (one JSON document with `as_json`) to standard output; whether all was reached."""
    async with RouterClient(target) as client:
        info = await client.model_info(timeout_seconds=30)
    with _progress(console, len(held_out.examples)) as advance:
        scores = await evaluate(target, held_out, concurrency=concurrency, on_answer=advance)
    out = Console()
    if as_json:
        out.file.write(json.dumps(_document(info, scores)) + "\n")
    else:
        out.print(_table(info, scores))
        for score in scores:
            for answer, given in score.wrong[:show_wrong]:
                out.print(f"{score.task.name}: {answer!r}, got {printable(given)!r}", markup=False, highlight=False)
    return all(score.reached for score in scores)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("questions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        line = progress.add_task("questions", total=total)
        yield lambda: progress.advance(line)


def _table(info: common_pb2.ModelInfo, scores: list[Score]) -> Table:
    table = Table(title=f"{info.model} · {info.tier} · {info.dtype}, held out, greedy", title_justify="left")
    table.add_column("task")
    table.add_column("right", justify="right")
    table.add_column("score", justify="right")
    table.add_column("must reach", justify="right")
    table.add_column("")
    for score in scores:
        must_reach = score.task.must_reach
        verdict = "" if must_reach is None else "[green]✓" if score.reached else "[red]below"
        table.add_row(
            score.task.title,
            f"{score.right}/{score.asked}",
            f"{100 * score.share:.1f} %",
            "" if must_reach is None else f"{100 * must_reach:.0f} %",
            verdict,
        )
    return table


def _document(info: common_pb2.ModelInfo, scores: list[Score]) -> dict[str, object]:
    return {
        "model": info.model,
        "tier": info.tier,
        "dtype": info.dtype,
        "checkpoint_digest": info.checkpoint_digest,
        "tasks": [
            {
                "name": score.task.name,
                "right": score.right,
                "asked": score.asked,
                "score": score.share,
                "must_reach": score.task.must_reach,
                "reached": score.reached,
                "wrong": [{"answer": answer, "given": given} for answer, given in score.wrong],
            }
            for score in scores
        ],
    }
