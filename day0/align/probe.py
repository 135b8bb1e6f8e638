"""Looks into a native forward, compares each tap with upstream's, and can carry on with upstream's value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from day0.align.family import AlignFamily
from day0.align.recorder import find_module
from day0.align.tap import (
    Comparison,
    Kind,
    Tap,
    Verdict,
    accumulated,
    compare_choice,
    compare_values,
    halves_are_swapped,
    tolerance,
)
from llm_svc.adopt.operators import Operators
from llm_svc.adopt.packed_product import PackedProduct
from llm_svc.native_model import NativeModel

_PHASES = ("_prefill", "_decode")
_MULTIPLIERS = {"mxfp4_expert_gemm": "expert_gemm"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the one sequence of a forward lies: slot of each of its positions so far, its state slot, new positions."""

    slots: Tensor
    state_slot: int
    start: int


class Probe:
    """Compares as a native forward runs.

    With `forced` each tap hands upstream's value on, so that every operator is judged on upstream's inputs and an error
    does not reach the taps behind it. Without, errors add up, and so do the tolerances.
    """

    def __init__(self, model: NativeModel, config: Any, family: AlignFamily, dtype: torch.dtype, forced: bool) -> None:
        self._config, self._family, self._dtype, self._forced = config, family, dtype, forced
        wrapped = {f.name: self._wrap(f.name, getattr(model.operators, f.name)) for f in fields(Operators)}
        operators = Operators(**wrapped)
        product = PackedProduct(
            operators, model.workspace, model.packed_product.counts, convert_tokens=0, experts_at_once=1
        )
        self.model = replace(model, operators=operators, packed_product=product)
        self.comparisons: list[Comparison] = []
        self._taps: list[dict[str, list[Tap]]] = []
        for layer in range(len(model.layers)):
            by_key: dict[str, list[Tap]] = {}
            for tap in family.taps(config, layer):
                by_key.setdefault(tap.native, []).append(tap)
            self._taps.append(by_key)
        self._layer = -1
        self._calls: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self._seen: set[tuple[int, str]] = set()
        self._allowed = 0.0
        self._tied = False

    @contextmanager
    def step(self, records: list[dict[str, Any]], place: Place) -> Iterator[None]:
        """Around one forward, with what upstream recorded of the same tokens."""
        self._records, self._place = records, place
        self._layer, self._seen, self._allowed = -1, set(), 0.0
        with ExitStack() as stack:
            for number, layer in enumerate(self.model.language_model.layers):
                stack.callback(layer.register_forward_pre_hook(partial(self._enter, number)).remove)
                for key in self._taps[number]:
                    path, _, side = key.partition(":")
                    module = find_module(layer, path) if side in ("in", "out") else None
                    if module is None:
                        continue
                    if side == "in":
                        hook = module.register_forward_pre_hook(partial(self._module_in, key))
                    else:
                        hook = module.register_forward_hook(partial(self._module_out, key))
                    stack.callback(hook.remove)
            yield
        self._find_unseen()

    def see_whole(self, name: str, operator: str, native: Tensor, upstream: Tensor, terms: int) -> None:
        """Compares a value that belongs to no layer."""
        tap = Tap(name, operator, "", lambda record: upstream, lambda config, tokens: terms)
        self._compare(None, tap, native, upstream, {})

    def _enter(self, number: int, module: nn.Module, args: Any) -> None:
        self._layer = number
        self._calls.clear()

    def _module_in(self, key: str, module: nn.Module, args: Any) -> Any:
        return (self._see(key, args[0]), *args[1:])

    def _module_out(self, key: str, module: nn.Module, args: Any, out: Any) -> Any:
        return self._see(key, out)

    def _wrap(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        short = name
        for phase in _PHASES:
            short = short.removesuffix(phase)
        short = _MULTIPLIERS.get(short, short)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls[short] += 1
            self._names[short] = name
            numbered = f"{short}#{self._calls[short]}"
            for key in (f"{short}:in", f"{numbered}:in"):
                args = self._see(key, args)
            out = operator(*args, **kwargs)
            for key, value, write in self._family.effects(short, args, kwargs, self._place):
                changed = self._see(key, value)
                if changed is not value:
                    write(changed)
            for key in (f"{short}:out", f"{numbered}:out"):
                out = self._see(key, out)
            return out

        return call

    def _see(self, key: str, value: Any) -> Any:
        if self._layer < 0 or key not in self._taps[self._layer]:
            return value
        record = self._records[self._layer]
        parts = list(value) if isinstance(value, tuple) else [value]
        for tap in self._taps[self._layer][key]:
            theirs = tap.upstream(record)
            if theirs is None:
                continue
            self._seen.add((self._layer, tap.name))
            part = tap.part or 0
            ours = parts[part]
            self._compare(self._layer, tap, ours, theirs, record, value)
            if self._forced and ours.numel() == theirs.numel():
                parts[part] = theirs.reshape(ours.shape).to(ours.dtype)
        return tuple(parts) if isinstance(value, tuple) else parts[0]

    def _compare(
        self, layer: int | None, tap: Tap, ours: Tensor, theirs: Tensor, record: Any, whole: Any = None
    ) -> None:
        allowed = tolerance(tap.terms(self._config, len(self._place.slots)), self._dtype)
        if not self._forced:
            if tap.kind is Kind.SAME_CHOICE:
                # Here our own choice is handed on, which was judged when it was made.
                return
            self._allowed = allowed = accumulated((self._allowed, allowed))
        if tap.kind is Kind.CHOICE:
            scores = tap.scores(record) if tap.scores is not None else None
            assert scores is not None, "upstream recorded a choice without its scores"
            found = compare_choice(ours, theirs.reshape(len(ours), -1), scores, tap.group, allowed)
        elif tap.kind is Kind.SAME_CHOICE:
            found = compare_choice(ours, theirs.reshape(len(ours), -1), ours.new_zeros(len(ours), 0), 1, 0.0)
        elif tap.kind is Kind.BY_CHOICE:
            found = compare_values(*self._family.by_choice(whole, record), allowed)
        else:
            found = compare_values(ours, theirs, allowed)
        verdict, error, note = found
        follows = False
        if verdict is Verdict.DIVERGES and not note and halves_are_swapped(ours, theirs, allowed):
            note = "the two halves of each row are swapped"
        if not self._forced:
            # Two right choices lead to two right answers; only the way by operator can judge what follows.
            follows = self._tied and verdict is Verdict.DIVERGES
            if follows:
                verdict, note = Verdict.TIE, "follows a choice between equal scores"
            self._tied |= verdict is Verdict.TIE
        # The name in full: which phase it was, and which of two products.
        operator = self._names.get(tap.operator, tap.operator)
        self.comparisons.append(Comparison(layer, tap.name, operator, verdict, error, allowed, note, follows))

    def _find_unseen(self) -> None:
        """A tap that our side never passed is a failure: nothing was compared there."""
        for layer, by_key in enumerate(self._taps):
            for taps in by_key.values():
                for tap in taps:
                    if (layer, tap.name) not in self._seen and tap.upstream(self._records[layer]) is not None:
                        note = f"our forward has no {tap.native}"
                        self.comparisons.append(
                            Comparison(layer, tap.name, tap.operator, Verdict.UNSEEN, 0.0, 0.0, note)
                        )
