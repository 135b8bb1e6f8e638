"""What aligning a family takes, as data; knows no family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from day0.align.tap import Record, Tap

if TYPE_CHECKING:
    from day0.align.probe import Place


Effect = tuple[str, Tensor, Callable[[Tensor], None]]


@dataclass(frozen=True, slots=True)
class AlignFamily:
    """Where to look in a definition, and what to compare.

    `taps` gives those of a layer from the text config and the layer's number. `modules` are watched below each layer
    where they exist. `functions` of upstream's modelling module are recorded as `name:in` and `name:out`. `methods` of
    modules are recorded under two keys, result and first argument, a list with an entry a call (None: not at all, and
    then the result alone, of the last call). `effects` gives what an operator of ours, called with these arguments,
    left in caches and states: key, value, and how to write another in its place. `extras` gives what else a record
    needs from upstream's layer, cache and layer number after a forward. `by_choice` puts weights of a choice of ours
    and of upstream in one order.
    """

    taps: Callable[[Any, int], tuple[Tap, ...]]
    modules: tuple[str, ...]
    functions: Mapping[str, str]
    methods: Mapping[str, Mapping[str, tuple[str, str | None]]]
    effects: Callable[
        [str, tuple[Any, ...], dict[str, Any], Place], Iterable[tuple[str, Tensor, Callable[[Tensor], None]]]
    ]
    extras: Callable[[nn.Module, Any, int], dict[str, Any]]
    by_choice: Callable[[Any, Record], tuple[Tensor, Tensor]]
