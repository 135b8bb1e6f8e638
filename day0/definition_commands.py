"""The commands that look at a definition before it is served: inventory, gap, experts; each imports what it needs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from day0.device_choice import Device

app = typer.Typer()

_MODEL = typer.Argument(help="A config.json, a folder or URI that holds one, or a model type of transformers.")
_JSON = typer.Option("--json", help="Print one JSON document.")
_MARKDOWN = typer.Option("--markdown", help="Write the same as Markdown to this file.")


class Dtype(StrEnum):
    """What weights and activations are counted in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@app.command()
def inventory(
    model: Annotated[str, _MODEL],
    dtype: Annotated[Dtype, typer.Option(help="Of weights and activations.")] = Dtype.bfloat16,
    tokens: Annotated[int, typer.Option(min=1, max=131072, help="Tokens of the prompt that is traced.")] = 128,
    operators: Annotated[int, typer.Option(min=0, help="Operators to show of each phase; --json has all.")] = 20,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List what a definition is made of, from its configuration alone: no weights, no GPU, a few seconds.

    Every class of module and every operator with shapes, counts, parameters, FLOPs and bytes a token, what the caches
    take, and through which seam each class can be given other arithmetic. Upstream's definition is built on the meta
    device and run there on shapes. What cannot be traced is said, with the reason.
    """
    from day0.inventory.command import inventory as run

    run(
        model,
        Console(),
        dtype=dtype,
        prompt_tokens=tokens,
        most_operators=operators,
        markdown=markdown,
        as_json=as_json,
    )


@app.command()
def gap(
    model: Annotated[str, _MODEL],
    device: Annotated[str, typer.Option(help="cpu, h200, h100, a100, l40s, or a description in a .json file.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Of weights and activations.")] = Dtype.bfloat16,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A setting of the language service.")
    ] = None,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Say what stands between a definition and production on a device, and what to do about it, cheapest first.

    Each part is native, reference only, upstream only or missing, with the reason of every backend that refuses; then
    the memory of weights by format, caches and scratch, the largest context and batch that fit, and settings that
    cannot work. The exit status is 1 when something is missing or a setting given cannot work.
    """
    from day0.gap.command import gap as run

    if not run(
        model,
        Console(),
        device=device,
        dtype=dtype,
        settings=settings or (),
        markdown=markdown,
        as_json=as_json,
    ):
        raise typer.Exit(1)


@app.command()
def experts(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of a checkpoint; without one the embedded model.")
    ] = None,
    examples: Annotated[Path | None, typer.Option(help="Another held-out set (.jsonl.xz).")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Prompts of each task; 0 is all.")] = 1,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.cpu,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and activations.")] = Dtype.float32,
    plot: Annotated[Path | None, typer.Option(help="Write a heat map to this PNG.")] = None,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Show which experts the tokens of the held-out prompts take, layer by layer, text and pictures apart.

    The prompts are prefilled in this process, through the tier that the service would choose. Memory does not grow with
    them: one number is kept for each expert, layer and modality.
    """
    from day0.embedded import embedded_held_out, embedded_model
    from day0.expert_activation.command import experts as run

    run(
        model or embedded_model(),
        examples or embedded_held_out(),
        Console(),
        tasks=task or (),
        limit=limit,
        device=device.value,
        dtype=dtype,
        plot=plot,
        markdown=markdown,
        as_json=as_json,
    )
