"""The command `day0 bench engine`; what it measures is in `engine`, which is imported when it runs."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from day0.bench.engine import EngineRow


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def engine(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or the preset glm-5.3-flash-8-layers.")],
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.cpu,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.float32,
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights from the folder's config alone.")] = False,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; may be repeated. 1.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that are timed.")] = 20,
    max_batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens in a forward at most.")] = 8192,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """Time prefill and decode steps of the engine in this process, without network and tokenizer.

    Prompts are random ids. Each batch is prefilled, then decodes greedily; a step is everything from scheduling to the
    ids on the host, and the median of --steps is shown. A preset makes random weights of a released model's shapes,
    MXFP4 experts included, on the device.
    """
    from day0.bench.engine import EngineOptions, bench_engine
    from llm_svc.build import LoadError
    from svc_common.checkpoint_errors import CheckpointError
    from svc_common.store_errors import StoreError

    console = Console()
    options = EngineOptions(
        model=model,
        device=device.value,
        dtype=dtype.value,
        load_format="dummy" if dummy else "checkpoint",
        batches=tuple(batch or (1,)),
        context_tokens=context,
        steps=steps,
        max_batch_tokens=max_batch_tokens,
    )
    rows: list[EngineRow] = []
    try:
        with console.status("loading"):
            result = bench_engine(options, rows.append)
    except (LoadError, CheckpointError, StoreError, ValueError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _table(rows: list[EngineRow]) -> Table:
    table = Table(title="Engine steps")
    for name in (
        "batch",
        "context",
        "prefill s",
        "prefill tok/s",
        "decode ms",
        "scheduling ms",
        "decode tok/s",
        "peak GB",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch),
            str(row.context_tokens),
            f"{row.prefill_seconds:.3f}",
            f"{row.prefill_tokens_per_second:,.0f}",
            f"{row.decode_ms:.2f}",
            f"{row.schedule_ms:.3f}",
            f"{row.decode_tokens_per_second:,.1f}",
            f"{row.peak_bytes / 1e9:.1f}" if row.peak_bytes else "-",
        )
    return table
