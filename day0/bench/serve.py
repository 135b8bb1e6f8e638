"""`day0 bench serve`: requests made, sent and measured against a running router; starts no service."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from day0.bench.dataset import Sample, Shape, make_samples
from day0.bench.load import Outcome, arrival_seconds, send_all
from day0.bench.summary import details, summarise
from day0.bench.table import result_table, show_errors
from day0.client import RouterClient


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are sent; None leaves a value to the checkpoint, or unbounded."""

    model: str = ""
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    timeout_seconds: float | None = None
    seed: int = 0
    percentiles: tuple[float, ...] = (99,)
    goodput_ms: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class ResultFile:
    """Where the result goes, when it is to be kept; `detailed` adds what each request did."""

    folder: Path
    name: str = ""
    detailed: bool = False


async def bench_serve(
    target: str,
    shape: Shape,
    token_ids: Sequence[int],
    options: LoadOptions,
    console: Console,
    *,
    num_warmups: int = 0,
    as_json: bool = False,
    result_file: ResultFile | None = None,
) -> bool:
    """Measure the router at `target` and show the figures; whether every request succeeded.

    The table or, with `as_json`, one JSON document goes to standard output, progress and errors to `console`. Raises
    ServiceError where the router does not answer at all.
    """
    samples = make_samples(shape, token_ids, options.seed)
    async with RouterClient(target) as client:
        info = await client.model_info(options.model, timeout_seconds=30)
        if num_warmups:
            # Other prompts than the measured ones, which would else be found in the prefix cache.
            warm = make_samples(replace(shape, num_prompts=num_warmups), token_ids, options.seed + 1_000_003)
            with progress_bar(console, "warming up", len(warm)) as advance:
                outcomes, _ = await run_load(client, warm, options, advance)
            if any(outcome.error for outcome in outcomes):
                console.print("the warm-up failed; nothing was measured", style="red")
                show_errors(outcomes, console)
                return False
        with progress_bar(console, "requests", len(samples)) as advance:
            outcomes, duration = await run_load(client, samples, options, advance)
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": info.model,
        "num_prompts": len(samples),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **summarise(outcomes, duration, percentiles=options.percentiles, goodput_ms=options.goodput_ms),
    }
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(result_table(result, options.percentiles))
    show_errors(outcomes, console)
    if result_file is not None:
        path = _save(result, outcomes, result_file)
        console.print(f"saved {path}", markup=False, highlight=False, soft_wrap=True)
    return not result["failed"]


async def run_load(
    client: RouterClient, samples: Sequence[Sample], options: LoadOptions, advance: Any
) -> tuple[list[Outcome], float]:
    """Send one request a sample as the options say; the outcomes and the duration in seconds."""
    requests = [
        sample.request(model=options.model, ignore_eos=options.ignore_eos, temperature=options.temperature)
        for sample in samples
    ]
    arrivals = arrival_seconds(len(requests), options.request_rate, options.burstiness, options.seed)
    return await send_all(
        client,
        requests,
        arrivals,
        max_concurrency=options.max_concurrency,
        timeout_seconds=options.timeout_seconds,
        on_end=lambda outcome: advance(),
    )


@contextmanager
def progress_bar(console: Console, words: str, total: int) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere; gives the function that counts one more."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(words, total=total)
        yield lambda: progress.advance(task)


def _save(result: Mapping[str, Any], outcomes: Sequence[Outcome], file: ResultFile) -> Path:
    file.folder.mkdir(parents=True, exist_ok=True)
    path = file.folder / (file.name or f"day0-{result['request_rate']}qps-{result['date']}.json")
    document = {**result, **(details(outcomes) if file.detailed else {})}
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
