"""The commands of `day0 bench` and their help; each imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from day0.bench.engine_command import engine

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure running services, with the names of vllm bench, and the operators on a GPU.",
)


class Dataset(StrEnum):
    """What the requests are made of."""

    random = "random"
    random_mm = "random-mm"


_GOODPUT = ("ttft", "tpot", "e2el")
_NOT_COMPARED = ("target", "model", "num_warmups", "temperature", "goodput", "save_detailed")


app.command()(engine)


@app.command()
def serve(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="The router, host:port.")] = "127.0.0.1:50051",
    model: Annotated[str, typer.Option(help="Model name; not needed where one is served.")] = "",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with tokenizer.json: draw from all its plain tokens. By default ids 100 to 299."),
    ] = None,
    dataset_name: Annotated[Dataset, typer.Option(help="random-mm puts pictures in front.")] = Dataset.random,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 1000,
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf sends all at once.")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="Shape of the gaps: 1 is Poisson, less is burstier.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at most.")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by this share; in [0, 1).")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(min=0, help="Tokens all prompts share, on top.")] = 0,
    random_mm_base_items_per_request: Annotated[int, typer.Option(min=1, help="random-mm: pictures a request.")] = 1,
    random_mm_image_size: Annotated[str, typer.Option(help="random-mm: WIDTHxHEIGHT in pixels.")] = "256x256",
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measurement, not counted.")] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers go on to their full length.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the checkpoint's own by default.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until a request is given up.")] = None,
    metric_percentiles: Annotated[str, typer.Option(help="Comma-separated.")] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="ttft, tpot or e2el with its limit in ms; may be repeated."),
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the result to a JSON file.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With what each request did.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of that file.")] = Path(),
    result_filename: Annotated[str, typer.Option(help="Its name; made from rate and date by default.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    compare_upstream: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Start the services on this checkpoint and compare with its `generate`."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --compare-upstream: times each side is measured.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="With --compare-upstream: of both sides; 0 is torch's.")] = 0,
) -> None:
    """Send requests to a router and show throughput and latencies.

    TTFT is the time to the first token, TPOT the mean time of the later ones, ITL the time between deltas, E2EL the
    time to the last token; definitions and names are those of `vllm bench serve`. Prompts are random token ids of exact
    length. The exit status is 1 when any request failed.

    --compare-upstream starts its own services and measures them and upstream's `generate`, one request at a time, in
    turn, on the same prompts with greedy tokens, which must be equal. The services idle while upstream runs.
    """
    from day0.bench.dataset import DEFAULT_TOKEN_IDS, BadDataset, Shape, plain_token_ids
    from day0.bench.serve import LoadOptions, ResultFile, bench_serve

    pictures = dataset_name is Dataset.random_mm
    shape = Shape(
        num_prompts=num_prompts,
        input_len=random_input_len,
        output_len=random_output_len,
        prefix_len=random_prefix_len,
        range_ratio=random_range_ratio,
        images=random_mm_base_items_per_request if pictures else 0,
        image_size=_size(random_mm_image_size),
    )
    load = LoadOptions(
        model=model,
        request_rate=_positive("--request-rate", request_rate),
        burstiness=_positive("--burstiness", burstiness),
        max_concurrency=max_concurrency,
        ignore_eos=ignore_eos,
        temperature=temperature,
        timeout_seconds=timeout,
        seed=seed,
        percentiles=_percentiles(metric_percentiles),
        goodput_ms=_goodput(goodput),
    )
    console = Console(stderr=True)
    file = ResultFile(result_dir, result_filename, save_detailed) if save_result or save_detailed else None
    try:
        if compare_upstream is not None:
            _refuse_unused(context, pictures)
            from dataclasses import replace

            from day0.bench.compare import CompareOptions, compare

            work = compare(
                CompareOptions(compare_upstream, rounds, threads),
                shape,
                plain_token_ids(tokenizer)
                if tokenizer
                else plain_token_ids(compare_upstream, option="--compare-upstream"),
                replace(load, model="", ignore_eos=True, temperature=0.0),
                console,
                context.obj,
                as_json=as_json,
                result_path=result_dir / (result_filename or "compare-upstream.json") if file else None,
            )
        else:
            ids = plain_token_ids(tokenizer) if tokenizer else DEFAULT_TOKEN_IDS
            work = bench_serve(
                target, shape, ids, load, console, num_warmups=num_warmups, as_json=as_json, result_file=file
            )
        right = asyncio.run(work)
    except BadDataset as error:
        raise typer.BadParameter(str(error)) from None
    if not right:
        raise typer.Exit(1)


@app.command()
def ops(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A family, or a part of an operator's and shape's name; may be repeated."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After these no further shape is begun.")] = math.inf,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time installed peers under ours.")] = True,
    warm: Annotated[
        bool, typer.Option("--warm", help="Build and check everything once, in --workers processes; time nothing.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --warm: shapes at a time.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write device, versions, ceilings and rows there.")
    ] = None,
) -> None:
    """Time the operators on this GPU beside their floors and the peers that are installed.

    Each shape is checked first: memory full of NaN, twice with equal bits, against float32. What is wrong has no time.
    Times are medians of CUDA graph replays over inputs that do not stay in L2. The floor is the larger of the bytes
    that must move at the rate of a copy and the operations at the rate of torch's own matrix product, both measured in
    the same run; the column after it says which one binds.

    Peers are other projects' kernels at the same shapes (FlashMLA, DeepGEMM, FlashInfer, fla, FlashKDA, Humming,
    triton_kernels, Liger, flash-attn-res, torch.compile); those not installed are left out. With a cold compiler cache,
    run it with --warm before. The exit status is 1 when a line of ours is wrong or there is no GPU.
    """
    from day0.bench.ops.run import NoGpu, OpsOptions, bench_ops

    options = OpsOptions(tuple(only or ()), _positive("--seconds", seconds), peers, warm, workers, json_file)
    try:
        right = bench_ops(options, Console())
    except NoGpu as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if not right:
        raise typer.Exit(1)


def _refuse_unused(context: typer.Context, pictures: bool) -> None:
    """Options that mean nothing beside --compare-upstream are an error, not ignored."""
    sources = {name: context.get_parameter_source(name) for name in _NOT_COMPARED}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise typer.BadParameter(f"{option}: means nothing with --compare-upstream, which starts its own services")
    if pictures:
        raise typer.BadParameter("--dataset-name: --compare-upstream takes random only")


def _positive(option: str, value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"{option}: above 0, got {value}")
    return value


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0):
        raise typer.BadParameter(f"--random-mm-image-size: WIDTHxHEIGHT in pixels, got {text!r}")
    return int(width), int(height)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 100 for value in values):
        raise typer.BadParameter(f"--metric-percentiles: comma-separated, each 0 to 100, got {text!r}")
    return values


def _goodput(texts: list[str] | None) -> dict[str, float] | None:
    if not texts:
        return None
    limits = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = -1.0
        if name not in _GOODPUT or not limits[name] >= 0:
            raise typer.BadParameter(f"--goodput: NAME:MS with NAME one of {', '.join(_GOODPUT)}, got {text!r}")
    return limits
