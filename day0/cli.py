"""The commands of `day0` and their help; each imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from day0.bench.commands import app as bench_app
from day0.comparison_commands import app as comparison_app
from day0.definition_commands import app as definition_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Serve sparse multimodal mixture-of-experts models on the community's own definition.

    A first session, without any model at hand:

    [bold]day0 serve[/bold]   start router, vision and language service on the small model that comes along

    [bold]day0 chat "What is shown here?" --image photo.png[/bold]   ask, in another terminal""",
)

app.add_typer(bench_app, name="bench")
app.add_typer(definition_app)
app.add_typer(comparison_app)


class Service(StrEnum):
    """What `--only` may name."""

    router = "router"
    vision = "vision"
    llm = "llm"


class Tier(StrEnum):
    """How the language service runs the definition."""

    auto = "auto"
    native = "native"
    upstream = "upstream"


class Family(StrEnum):
    """Families `day0 tiny` can write."""

    glm5_next = "glm5_next"


@app.command()
def tiny(
    family: Annotated[Family, typer.Argument(help="Model family.")],
    folder: Annotated[Path, typer.Argument(help="New or empty folder.")],
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
) -> None:
    """Write a small random checkpoint (about 2 MB) in the full Hugging Face layout.

    Sharded safetensors with an index, config, generation config, byte-level BPE tokenizer, chat template and
    preprocessor config. It has every part of the real architecture; its answers mean nothing.
    """
    from day0.tiny import write_tiny_checkpoint

    print(write_tiny_checkpoint(folder, seed=seed))


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a bf16, fp16 or fp32 checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New or empty folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
) -> None:
    """Write a checkpoint with its routed experts in MXFP4, as compressed-tensors stores it (mxfp4-pack-quantized).

    Every group of 32 weights gets the power of two with the least squared error. Everything else is copied as it is.
    Works through one file after the other; memory does not grow with the checkpoint. The folder appears when it is
    complete. The report gives the relative error of each layer, and the bytes before and after.
    """
    from day0.quantize_command import quantize as run

    run(source, destination, Console(), Console(stderr=True), as_json=as_json)


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a checkpoint: a path, file://, s3://, gs:// or az://. Without one the small model that "
            "comes with day0 is served."
        ),
    ] = None,
    only: Annotated[Service | None, typer.Option(help="Run this service alone.")] = None,
    host: Annotated[str, typer.Option(help="Address all ports listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port of the router; 0 is any free one.")] = 50051,
    name: Annotated[str, typer.Option(help="Name the model is served under; the folder's by default.")] = "",
    tier: Annotated[Tier, typer.Option(help="native is ours and fast, upstream runs any model.")] = Tier.auto,
    vision_target: Annotated[str, typer.Option(help="With --only llm: the vision service, host:port.")] = "",
    llm_target: Annotated[list[str] | None, typer.Option(help="With --only router: a language service.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SERVICE.FIELD=VALUE", help="Any setting, as llm.cache_tokens=8192."),
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for the logs; a temporary one by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the endpoints as one JSON line.")] = False,
) -> None:
    """Start router, vision and language service as three processes and print where they listen.

    Ctrl-C (or SIGTERM) drains and stops all. When one of them ends by itself the others are stopped too, the end of its
    log is shown and the exit status is 1. Settings can also be environment variables: DAY0_ROUTER_..., DAY0_VISION_...,
    DAY0_LLM_....
    """
    from day0.embedded import embedded_model
    from day0.plan import ServeOptions, make_plans
    from day0.serve import serve as run
    from day0.stack import Stack

    if model is None and only is not Service.router:
        model = str(embedded_model())
    options = ServeOptions(
        model=model,
        only=only.value if only else None,
        host=host,
        port=port,
        model_name=name,
        tier=tier.value,
        vision_target=vision_target,
        llm_targets=tuple(llm_target or ()),
        settings=tuple(settings or ()),
    )
    plans = make_plans(options)
    folder = log_dir if log_dir is not None else Path(tempfile.mkdtemp(prefix="day0-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(Stack(plans, folder, context.obj), Console(stderr=True), as_json=as_json))


@app.command()
def chat(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[list[str] | None, typer.Option(help="Picture file or data: URL; may be repeated.")] = None,
    target: Annotated[str, typer.Option(help="The router, host:port.")] = "127.0.0.1:50051",
    model: Annotated[str, typer.Option(help="Model name; not needed where one is served.")] = "",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the answer; may be repeated.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until the request is given up.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of streaming.")] = False,
) -> None:
    """Ask a question about pictures, stream the answer, then print its figures.

    TTFT is the time to the first token; tokens/s is the rate after it. The pictures come before the question, in order.
    """
    from day0.chat import ChatOptions
    from day0.chat import chat as ask

    options = ChatOptions(
        question=question,
        images=tuple(image or ()),
        target=target,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        timeout_seconds=timeout,
    )
    asyncio.run(ask(options, Console(), as_json=as_json))


@app.command()
def demo(
    context: typer.Context,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder that keeps the pictures; without one they go with the demo.")
    ] = None,
) -> None:
    """Go the whole way once: the embedded model, three services, pictures and a long text, streamed answers.

    The questions are of the held-out set, so each has one right answer. The exit status is 1 when one is wrong.
    """
    from day0.demo import demo as run

    if not asyncio.run(run(context.obj, Console(), pictures=pictures)):
        raise typer.Exit(1)


@app.command(name="demo-eval")
def demo_eval(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option(help="A running router, host:port; without one the embedded model is started.")
    ] = None,
    examples: Annotated[Path | None, typer.Option(help="Another held-out set (.jsonl.xz).")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Questions of each task; 0 is all.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Questions in flight.")] = 8,
    show_wrong: Annotated[int, typer.Option(min=0, help="Wrong answers to show of each task.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, with every wrong answer.")] = False,
) -> None:
    """Ask the embedded model its held-out questions through the running services and print the scores.

    Pictures in typefaces it has not seen, sums it was not taught, facts hidden in long texts. An answer counts when it
    is the expected sentence, to the letter. The exit status is 1 when a task is below what it must reach.
    """
    from day0.demo_eval import run_demo_eval
    from day0.embedded import embedded_held_out
    from day0.heldout import read_held_out

    held_out = read_held_out(examples or embedded_held_out()).choose(task or (), limit)
    reached = asyncio.run(
        run_demo_eval(
            context.obj,
            held_out,
            Console(stderr=True),
            target=target,
            concurrency=concurrency,
            show_wrong=show_wrong,
            as_json=as_json,
        )
    )
    if not reached:
        raise typer.Exit(1)


_MEMORY_HELP = "Most memory for bytes in flight, in MiB."


@app.command()
def manifest(
    uri: Annotated[str, typer.Argument(help="Folder of a checkpoint: a path, file://, s3://, gs:// or az://.")],
    memory_mib: Annotated[int, typer.Option(min=1, help=_MEMORY_HELP)] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write day0-manifest.json beside a checkpoint: size and sha256 of each file and each tensor.

    Reads every byte once. Settings and credentials of a store come from its usual environment variables, as
    AWS_ENDPOINT_URL.
    """
    from day0.manifest import make

    make(uri, memory_mib=memory_mib, as_json=as_json)


@app.command()
def verify(
    uri: Annotated[str, typer.Argument(help="Folder of a checkpoint: a path, file://, s3://, gs:// or az://.")],
    memory_mib: Annotated[int, typer.Option(min=1, help=_MEMORY_HELP)] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check a checkpoint against its day0-manifest.json, without loading it.

    Every difference is listed with its file and tensor; the exit status is then 1.
    """
    from day0.manifest import verify as check

    if not check(uri, memory_mib=memory_mib, as_json=as_json):
        raise typer.Exit(1)


def run(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run one command; the exit status: 0, 1 for a failure, 2 for a bad command line, 130 after Ctrl-C."""
    from day0.chat import UnreadableImage
    from day0.heldout import HeldOutError
    from day0.inventory.source import InventoryError
    from day0.plan import PlanError
    from day0.service_process import ServiceFailed
    from svc_common.checkpoint_errors import CheckpointError
    from svc_common.errors import ServiceError
    from svc_common.store_errors import StoreError

    try:
        app(arguments, standalone_mode=True, prog_name="day0", obj=dict(environ))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except (PlanError, InventoryError, UnreadableImage, HeldOutError, FileExistsError, FileNotFoundError) as error:
        print(f"day0: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"day0: this needs {error.name}; install 'day0[router,vision,llm,tools]'", file=sys.stderr)
        return 1
    except ServiceError as error:
        print(f"day0: {error.status.name}: {error.message}", file=sys.stderr)
        return 1
    except (ServiceFailed, StoreError, CheckpointError) as error:
        print(f"day0: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        # The demo and its evaluation end so after a SIGTERM.
        return 143
    return 0
