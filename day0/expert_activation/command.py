"""`day0 experts`: measures the activation of experts and shows it, with a plot where one is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from day0.expert_activation.counts import ActivationError, Load
from day0.expert_activation.measure import Activation, measure_activation
from day0.expert_activation.plot import write_plot
from day0.heldout import read_held_out
from day0.inventory.quiet import quiet
from day0.tiny import quiet as no_progress_bar
from llm_svc.build import LoadError
from llm_svc.settings import LlmSettings

_MOST_SHOWN = 3


def experts(
    model: Path,
    examples: Path,
    console: Console,
    *,
    tasks: Sequence[str],
    limit: int,
    device: str,
    dtype: str,
    plot: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Raises ActivationError, CheckpointError and HeldOutError."""
    if plot is not None:
        # Said before minutes of measuring, where it is not installed.
        import matplotlib  # noqa: F401
    held_out = read_held_out(examples).choose(tasks, limit)
    settings = LlmSettings(model=str(model), device=device, dtype=dtype, max_running_sequences=1)
    with (
        quiet(),
        no_progress_bar(),
        Progress(console=Console(stderr=True), disable=as_json, transient=True) as progress,
    ):
        running = progress.add_task("prompts", total=len(held_out.examples))
        try:
            found = measure_activation(settings, held_out, lambda done: progress.update(running, completed=done))
        except LoadError as error:
            raise ActivationError(f"MODEL: {error}") from error
    if plot is not None:
        write_plot(found, plot)
    if markdown is not None:
        markdown.write_text(to_markdown(found))
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        console.print(_table(found))
        console.print(
            f"{found.model}, {found.tier} tier, {found.prompts} prompts. Evenness is entropy over its most: 1 where "
            "all experts are taken alike.",
            highlight=False,
        )


_HEAD = ("layer", "modality", "tokens", "entropy", "evenness", "idle", "hottest, share of the choices")


def to_json(activation: Activation) -> dict[str, Any]:
    """All counts."""
    return {
        "model": activation.model,
        "tier": activation.tier,
        "prompts": activation.prompts,
        "experts": len(activation.loads[0].counts),
        "loads": [
            {
                "layer": load.layer,
                "modality": load.modality,
                "tokens": load.tokens,
                "entropy_bits": load.entropy_bits,
                "evenness": load.evenness,
                "idle": load.idle,
                "hottest": [{"expert": expert, "share": share} for expert, share in load.hottest(_MOST_SHOWN)],
                "counts": list(load.counts),
            }
            for load in activation.loads
        ],
    }


def to_markdown(activation: Activation) -> str:
    """One table."""
    from day0.inventory.document import markdown_table

    title = f"# Experts of {activation.model}: {activation.prompts} prompts, {activation.tier} tier"
    return f"{title}\n\n{markdown_table(_HEAD, [_cells(load) for load in activation.loads])}\n"


def _table(activation: Activation) -> Table:
    table = Table(title="Experts taken, layers in the order they run", title_justify="left", box=SIMPLE_HEAD)
    for column in _HEAD:
        table.add_column(column, justify="left" if column in ("modality", _HEAD[-1]) else "right", no_wrap=True)
    for load in activation.loads:
        table.add_row(*_cells(load))
    return table


def _cells(load: Load) -> tuple[str, ...]:
    if not load.tokens:
        return str(load.layer), load.modality, "0", "-", "-", "-", "no such token"
    hottest = ", ".join(f"{expert}: {share:.1%}" for expert, share in load.hottest(_MOST_SHOWN))
    return (
        str(load.layer),
        load.modality,
        f"{load.tokens:,}",
        f"{load.entropy_bits:.3f}",
        f"{load.evenness:.3f}",
        str(load.idle),
        hottest,
    )
