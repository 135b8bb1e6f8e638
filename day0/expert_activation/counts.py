"""Counts how often each expert is chosen, by layer and modality; holds one number an expert and no token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from day0.inventory.source import InventoryError

MODALITIES = ("text", "visual")


class ActivationError(InventoryError):
    """The model's experts cannot be counted, or there are none; the message says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """Choices of one layer by the tokens of one modality.

    `counts[e]` tokens took expert e; each of `tokens` takes several. `entropy_bits` is that of the shares, at most
    log2 of the number of experts, where all are taken alike; `evenness` is it over that most.
    """

    layer: int
    modality: str
    tokens: int
    counts: tuple[int, ...]

    @property
    def entropy_bits(self) -> float:
        """-sum p log2 p over the shares p; 0 where no token was seen."""
        total = sum(self.counts)
        return -sum(count / total * math.log2(count / total) for count in self.counts if count) if total else 0.0

    @property
    def evenness(self) -> float:
        """1 where every expert is taken alike, 0 where all tokens take the same one."""
        return self.entropy_bits / math.log2(len(self.counts)) if len(self.counts) > 1 else 1.0

    def hottest(self, most: int) -> list[tuple[int, float]]:
        """Experts with the largest shares of the choices, the lowest number first among equals."""
        total = sum(self.counts) or 1
        order = sorted(range(len(self.counts)), key=lambda expert: (-self.counts[expert], expert))
        return [(expert, self.counts[expert] / total) for expert in order[:most]]

    @property
    def idle(self) -> int:
        """Experts that no token took."""
        return sum(count == 0 for count in self.counts)


class ActivationCounts:
    """Counts of all layers, int64 [layers, 2, experts]; its size does not depend on the number of tokens.

    While `watching` is open, every call of a module of experts is counted; layers are numbered in the order in which
    they are first called. `visual` says of each token of the coming forward whether it is one.
    """

    def __init__(self) -> None:
        self._layers: dict[int, int] = {}
        self._counts: list[torch.Tensor] = []
        self._tokens: list[list[int]] = []
        self._visual = torch.zeros(0, dtype=torch.bool)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at every forward of this process for as long as it is open."""
        handle = register_module_forward_pre_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def expect(self, visual: list[bool]) -> None:
        """The tokens of the coming forward, in its order: True for a visual token."""
        self._visual = torch.tensor(visual, dtype=torch.bool)

    def loads(self) -> list[Load]:
        """By layer, text before visual. ActivationError where no module of experts was called."""
        if not self._counts:
            raise ActivationError("no module of experts was called: the model has none, or names them otherwise")
        return [
            Load(layer, modality, self._tokens[layer][index], tuple(counts[index].tolist()))
            for layer, counts in enumerate(self._counts)
            for index, modality in enumerate(MODALITIES)
        ]

    def _see(self, module: nn.Module, args: Any) -> None:
        if not type(module).__name__.endswith("Experts") or len(args) < 3:
            return
        chosen = args[1].detach().to("cpu")
        if chosen.dim() != 2 or len(chosen) != len(self._visual):
            raise ActivationError(
                f"{type(module).__name__} got choices of shape {list(chosen.shape)} for {len(self._visual)} tokens"
            )
        layer = self._layers.setdefault(id(module), len(self._layers))
        if layer == len(self._counts):
            self._counts.append(torch.zeros(len(MODALITIES), _experts(module), dtype=torch.int64))
            self._tokens.append([0] * len(MODALITIES))
        for index, mine in enumerate((~self._visual, self._visual)):
            self._counts[layer][index] += torch.bincount(chosen[mine].flatten(), minlength=_experts(module))
            self._tokens[layer][index] += int(mine.sum())


def _experts(module: Any) -> int:
    count = getattr(module, "num_experts", None)
    if isinstance(count, int):
        return count
    stacked = next((p for p in module.parameters(recurse=False) if p.dim() == 3), None)
    if stacked is None:
        raise ActivationError(f"{type(module).__name__} does not say how many experts it has")
    return len(stacked)
