"""The commands that compare what we compute: align, parity, recall; each imports what it needs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from day0.device_choice import Device

app = typer.Typer()

_FOLDER = typer.Argument(help="Folder of a checkpoint; without one the embedded model.")
_JSON = typer.Option("--json", help="Print one JSON document.")
_MARKDOWN = typer.Option("--markdown", help="Write the same as Markdown to this file.")
_DTYPE = typer.Option(help="Of weights and activations.")


class Dtype(StrEnum):
    """What both sides compute in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Reference(StrEnum):
    """What `align` compares with."""

    upstream = "upstream"


@app.command()
def align(
    model: Annotated[Path | None, _FOLDER] = None,
    ref: Annotated[Reference, typer.Option(help="What to compare with.")] = Reference.upstream,
    dtype: Annotated[Dtype, _DTYPE] = Dtype.float32,
    with_kernels: Annotated[
        bool,
        typer.Option("--with-kernels", help="Compare also where fla or causal_conv1d replace upstream's formulas."),
    ] = False,
    every_tap: Annotated[
        bool, typer.Option("--every-tap", help="Show all taps, not only the worst and the wrong.")
    ] = False,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Compare each operator with unmodified upstream on the same inputs, and name the first that differs.

    Text and a picture, a whole prompt, a prompt in chunks, and token by token. First every operator gets upstream's
    inputs, so that one error does not reach the taps behind it, then the whole way end to end. Equal scores that are
    ordered otherwise are told apart from errors. The exit status is 1 when something differs.
    """
    from day0.align.command import run_align

    folder = _checkpoint(model)
    options = {"with_kernels": with_kernels, "every_tap": every_tap}
    if not run_align(folder, Console(), dtype=dtype.value, **options, markdown=markdown, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def parity(
    model: Annotated[Path | None, _FOLDER] = None,
    dtype: Annotated[Dtype, _DTYPE] = Dtype.float32,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.cpu,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Check that answers do not depend on how the work is cut, cached and shared.

    A whole prefill against chunks, a prefix hit, a restored state, another picture at the same ids, preemption, a batch
    of neighbours, and token by token, through the service's own engine, scheduler and runner in this process. The exit
    status is 1 when a way differs, or could not be taken.
    """
    from day0.parity.command import run_parity

    folder = _checkpoint(model)
    if not run_parity(folder, Console(), dtype=dtype.value, device=device.value, markdown=markdown, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def recall(
    model: Annotated[Path | None, _FOLDER] = None,
    text: Annotated[Path | None, typer.Option(help="Text to read; without one the embedded held-out set's.")] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens before the queries; may be repeated.")] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries to look at before each length.")] = 32,
    least_mass: Annotated[float, typer.Option(min=0, max=1, help="Attention every layer has to keep.")] = 0.0,
    dtype: Annotated[Dtype, _DTYPE] = Dtype.float32,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.cpu,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG.")] = None,
    markdown: Annotated[Path | None, _MARKDOWN] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Measure how much of dense attention the indexer's choice keeps, layer by layer and length by length.

    Recall is the share of the positions with the most attention that were chosen. The exit status is 1 when a layer
    keeps less attention than --least-mass.
    """
    from day0.embedded import embedded_held_out
    from day0.recall.command import run_recall

    if not run_recall(
        _checkpoint(model),
        text,
        embedded_held_out(),
        Console(),
        lengths=sorted(set(length or (256, 512, 1024, 2048))),
        queries=queries,
        least_mass=least_mass,
        dtype=dtype.value,
        device=device.value,
        plot=plot,
        markdown=markdown,
        as_json=as_json,
    ):
        raise typer.Exit(1)


def _checkpoint(model: Path | None) -> Path:
    """The folder asked for, or the embedded model's; BadParameter for one that is none of a checkpoint."""
    from day0.embedded import embedded_model

    folder = model or embedded_model()
    if not (folder / "config.json").is_file():
        why = "has no config.json" if folder.is_dir() else "is no folder"
        raise typer.BadParameter(f"{folder} {why}; a checkpoint's folder is needed", param_hint="MODEL")
    return folder
