"""`day0 bench serve --compare-upstream`: services and upstream's `generate` in turn, on the same prompts."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from day0.bench.dataset import Sample, Shape, make_samples
from day0.bench.load import Outcome
from day0.bench.machine import environment, load_average
from day0.bench.serve import LoadOptions, progress_bar, run_load
from day0.bench.summary import summarise
from day0.bench.table import show_errors
from day0.bench.upstream import Upstream, UpstreamRun
from day0.client import RouterClient
from day0.plan import ServeOptions, make_plans
from day0.serve import running
from day0.stack import Stack


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared: `rounds` times, with `threads` of one matrix product on both sides (0: torch's choice)."""

    model: Path
    rounds: int = 3
    threads: int = 0


async def compare(
    options: CompareOptions,
    shape: Shape,
    token_ids: Sequence[int],
    load: LoadOptions,
    console: Console,
    environ: Mapping[str, str],
    *,
    as_json: bool = False,
    result_path: Path | None = None,
) -> bool:
    """Start the services, measure them and upstream in turn, show medians and ratio; whether all went right.

    It goes right when every request succeeds and its greedy tokens equal upstream's. While upstream runs the services
    are up and idle. Each round has prompts of its own, so nothing is found in a prefix cache. Raises ServiceFailed,
    and CancelledError after a SIGTERM, when all is stopped.
    """
    task = asyncio.current_task()
    assert task is not None
    # The services would outlive us.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    load_before = load_average()
    threads = (f"llm.threads={options.threads}",) if options.threads else ()
    serve = ServeOptions(str(options.model), port=0, settings=threads)
    upstream = await asyncio.to_thread(Upstream, options.model, threads=options.threads)
    with tempfile.TemporaryDirectory(prefix="day0-bench-") as logs:
        stack = Stack(make_plans(serve), Path(logs), environ)
        async with running(stack, console), RouterClient(stack.router_target or "") as client:
            warm = make_samples(replace(shape, num_prompts=2), token_ids, load.seed + 1_000_003)
            await run_load(client, warm, load, lambda: None)
            await asyncio.to_thread(upstream.generate, warm)
            rounds = []
            for number in range(options.rounds):
                samples = make_samples(shape, token_ids, load.seed + number)
                rounds.append(await _round(client, upstream, samples, load, console, f"{number + 1}/{options.rounds}"))
            info = await client.model_info(timeout_seconds=30)
    result = {
        "model_id": info.model,
        "tier": info.tier,
        "shape": {"num_prompts": shape.num_prompts, "input_len": shape.input_len, "output_len": shape.output_len},
        "max_concurrency": load.max_concurrency,
        "threads": options.threads or "torch's choice",
        "environment": {**environment(), "operator_backends": ", ".join(sorted(set(info.operator_backends.values())))},
        "load_average_before": load_before,
        "rounds": rounds,
        "median_output_throughput": _median(rounds, "output_throughput"),
        "median_upstream_output_throughput": _median(rounds, "upstream_output_throughput"),
        "ratio": _median(rounds, "ratio"),
        "tokens_equal": all(each["tokens_equal"] for each in rounds),
    }
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(comparison_table(result))
    if result_path is not None:
        result_path.parent.mkdir(parents=True, exist_ok=True)
        result_path.write_text(json.dumps(result, indent=2) + "\n")
    if not result["tokens_equal"]:
        console.print("greedy tokens differ from upstream's", style="red")
    return bool(result["tokens_equal"])


async def _round(
    client: RouterClient,
    upstream: Upstream,
    samples: Sequence[Sample],
    load: LoadOptions,
    console: Console,
    words: str,
) -> dict[str, Any]:
    with progress_bar(console, f"services {words}", len(samples)) as advance:
        outcomes, duration = await run_load(client, samples, load, advance)
    show_errors(outcomes, console)
    with progress_bar(console, f"upstream {words}", len(samples)) as advance:
        alone = await asyncio.to_thread(upstream.generate, samples, advance)
    served = summarise(outcomes, duration, percentiles=load.percentiles)
    return {
        **served,
        "upstream_duration": alone.duration_seconds,
        "upstream_output_throughput": alone.tokens_per_second,
        "ratio": served["output_throughput"] / alone.tokens_per_second,
        "tokens_equal": same_tokens(outcomes, alone),
    }


def same_tokens(outcomes: Sequence[Outcome], alone: UpstreamRun) -> bool:
    """Whether every request succeeded with upstream's token ids."""
    return all(
        outcome.answer is not None and outcome.answer.token_ids.get(0) == token_ids
        for outcome, token_ids in zip(outcomes, alone.token_ids, strict=True)
    )


def comparison_table(result: Mapping[str, Any]) -> Table:
    """One line a round, then the medians."""
    concurrency = result["max_concurrency"] or "all"
    table = Table(title=f"{result['model_id']}: {concurrency} clients against upstream one at a time")
    for words in ("round", "day0 tok/s", "upstream tok/s", "ratio", "median TTFT (ms)", "median TPOT (ms)", "tokens"):
        table.add_column(words, justify="right")
    for number, each in enumerate(result["rounds"], 1):
        table.add_row(
            str(number),
            f"{each['output_throughput']:.1f}",
            f"{each['upstream_output_throughput']:.1f}",
            f"{each['ratio']:.2f}",
            "-" if each["median_ttft_ms"] is None else f"{each['median_ttft_ms']:.1f}",
            "-" if each["median_tpot_ms"] is None else f"{each['median_tpot_ms']:.1f}",
            "equal" if each["tokens_equal"] else "differ",
        )
    table.add_section()
    medians = ("median_output_throughput", "median_upstream_output_throughput")
    table.add_row("median", *(f"{result[key]:.1f}" for key in medians), f"{result['ratio']:.2f}", "", "", "")
    return table


def _median(rounds: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)
