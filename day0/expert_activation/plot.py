"""Draws the share of each expert by layer as a heat map, one panel a modality; computes no share."""

from __future__ import annotations

from pathlib import Path

from day0.expert_activation.counts import MODALITIES
from day0.expert_activation.measure import Activation


def write_plot(activation: Activation, path: Path) -> None:
    """A PNG; shares are relative to an even choice, so 1 is what every expert would have."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = max(load.layer for load in activation.loads) + 1
    experts = len(activation.loads[0].counts)
    figure = Figure(figsize=(max(7.0, experts / 24), 2.4 + 0.5 * layers), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(MODALITIES), 1, sharex=True)
    figure.suptitle(f"{activation.model}: experts of {activation.prompts} prompts, {activation.tier} tier")
    top = max((load.hottest(1)[0][1] * experts for load in activation.loads if load.tokens), default=1.0)
    for panel, modality in zip(panels, MODALITIES, strict=True):
        mine = [load for load in activation.loads if load.modality == modality]
        shares = [[count * experts / (sum(load.counts) or 1) for count in load.counts] for load in mine]
        image = panel.imshow(shares, aspect="auto", vmin=0, vmax=top, cmap="viridis", interpolation="nearest")
        panel.set_title(f"{modality}: {mine[0].tokens:,} tokens")
        panel.set_ylabel("layer with experts")
        panel.set_yticks(range(layers), [f"{load.layer} ({load.evenness:.2f})" for load in mine])
    panels[-1].set_xlabel("expert; beside each layer its evenness (1: all alike)")
    figure.colorbar(image, ax=list(panels), label="share / even share")
    figure.savefig(path, format="png")
