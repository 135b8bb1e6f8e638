"""Draws recall and attention kept by length, one line a layer; computes neither."""

from __future__ import annotations

from pathlib import Path

from day0.recall.measure import Recalls


def write_plot(found: Recalls, path: Path) -> None:
    """A PNG with two panels; the dotted line is a random choice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    figure.suptitle(f"{found.model}: the indexer's choice against dense attention")
    for layer in sorted({recall.layer for recall in found.recalls}):
        mine = [recall for recall in found.recalls if recall.layer == layer]
        lengths = [recall.length_tokens for recall in mine]
        left.plot(lengths, [recall.recall for recall in mine], marker="o", label=f"layer {layer}")
        right.plot(lengths, [recall.mass for recall in mine], marker="o", label=f"layer {layer}")
    for panel, title in ((left, "top-k recall"), (right, "attention kept")):
        panel.plot(lengths, [recall.chance for recall in mine], linestyle=":", color="grey", label="random choice")
        panel.set_title(title)
        panel.set_xlabel("length in tokens")
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.03)
        panel.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, format="png")
