"""The command `day0 bench engine`; what it measures is in `engine`, which is imported when it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from day0.device_choice import Device

if TYPE_CHECKING:
    from day0.bench.engine import DecodeRow, PrefillRow, Row
    from day0.bench.engine_soak import SoakResult
    from llm_svc.engine import EngineLoad


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def engine(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or the preset glm-5.3-flash-8-layers.")],
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.cpu,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.float32,
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights from the folder's config alone.")] = False,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; may be repeated. 1.")] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of each prompt; repeatable. 2048.")] = None,
    prefill: Annotated[
        list[int] | None, typer.Option(min=1, help="Also time one prompt this long; repeatable.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that are timed.")] = 20,
    max_batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens in a forward at most.")] = 8192,
    compare_upstream: Annotated[
        bool, typer.Option("--compare-upstream", help="Have unmodified transformers do the same before.")
    ] = False,
    upstream_seconds: Annotated[float, typer.Option(min=1, help="Time for transformers at most.")] = 300.0,
    soak: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Then keep it busy so long, with cancels, and look for growth."),
    ] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """Time prefill and decode steps of the engine in this process, without network and tokenizer.

    Prompts are random ids. Each batch is prefilled, then decodes greedily; a step is everything from scheduling to the
    ids on the host, and the median of --steps is shown. The floor is what the bytes of a step take at the rate of a
    copy: every weight but the experts once, the experts that the batch is expected to choose, its states and cache
    rows. A preset makes random weights of a released model's shapes, MXFP4 experts included, on the device. A soak ends
    with exit code 1 where a request failed, a block, a slot or memory did not come back, or steps got slower.
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
        contexts=tuple(context or (2048,)),
        prefills=tuple(prefill or ()),
        steps=steps,
        max_batch_tokens=max_batch_tokens,
        compare_upstream=compare_upstream,
        upstream_seconds=upstream_seconds,
        soak_seconds=soak,
    )
    rows: list[Row | SoakResult] = []
    try:
        with console.status("upstream, then loading" if compare_upstream else "loading") as status:

            def told(row: Row | SoakResult) -> None:
                rows.append(row)
                status.update(f"{len(rows)} rows measured")

            def progress(seconds: float, load: EngineLoad) -> None:
                running, free = load.running_sequences, load.free_blocks
                status.update(f"soak: {seconds:.0f} of {soak:.0f} s, {running} sequences run, {free:,} blocks are free")

            result = bench_engine(options, told, progress)
    except (LoadError, CheckpointError, StoreError, ValueError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    for table in tables(rows):
        console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if result["soak"] is not None and result["soak"]["problems"]:
        raise typer.Exit(1)


def tables(rows: Sequence[Row | SoakResult]) -> list[Table]:
    """One of the decode steps and one of the prefills, each where there are any."""
    from day0.bench.engine import DecodeRow, PrefillRow
    from day0.bench.engine_soak import SoakResult

    decodes = [row for row in rows if isinstance(row, DecodeRow)]
    prefills = [row for row in rows if isinstance(row, PrefillRow)]
    made = []
    if decodes:
        heads: tuple[str, ...] = (
            "batch",
            "context",
            "ms",
            "host ms",
            "tok/s",
            "floor ms",
            "of floor",
            "upstream ms",
            "faster",
        )
        made.append(_table("Decode steps", heads, [_decode_cells(row) for row in decodes]))
    if prefills:
        heads = ("tokens", "s", "tok/s", "peak GB", "upstream s", "upstream GB", "faster")
        made.append(_table("Prefill of one prompt", heads, [_prefill_cells(row) for row in prefills]))
    made += [_soak_table(row) for row in rows if isinstance(row, SoakResult)]
    return made


def _soak_table(result: SoakResult) -> Table:
    table = Table(title=f"Soak of {result.seconds:.0f} s", show_header=False)
    lines = {
        "requests": f"{result.finished:,} finished, {result.cancelled:,} cancelled, {result.failed:,} failed",
        "decode steps alone": f"{result.decode_steps:,}",
        "last steps to first": "-"
        if result.step_drift is None
        else f"{result.step_drift:.2f}, batch {result.drift_batch}",
        "not given back": f"{result.lost_blocks} blocks, {result.lost_slots} state slots",
        "memory before, after": f"{result.bytes_before / 1e9:.2f}, {result.bytes_after / 1e9:.2f} GB",
        "verdict": "; ".join(result.problems()) or "nothing grew",
    }
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def _table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def _decode_cells(row: DecodeRow) -> list[str]:
    return [
        str(row.batch),
        f"{row.context_tokens:,}",
        f"{row.decode_ms:.2f}",
        f"{row.host_ms:.2f}",
        f"{row.tokens_per_second:,.1f}",
        _optional(row.floor_ms, ".2f"),
        "-" if row.floor_ms is None else f"{row.floor_ms / row.decode_ms:.0%}",
        row.upstream_error or _optional(row.upstream_ms, ",.1f"),
        "-" if row.upstream_ms is None else f"{row.upstream_ms / row.decode_ms:.1f}x",
    ]


def _prefill_cells(row: PrefillRow) -> list[str]:
    return [
        f"{row.tokens:,}",
        f"{row.seconds:.3f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.peak_bytes / 1e9:.1f}" if row.peak_bytes else "-",
        row.upstream_error or _optional(row.upstream_seconds, ".3f"),
        f"{row.upstream_peak_bytes / 1e9:.1f}" if row.upstream_peak_bytes else "-",
        "-" if row.upstream_seconds is None else f"{row.upstream_seconds / row.seconds:.1f}x",
    ]


def _optional(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
