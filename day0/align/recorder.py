"""Records what upstream's layers compute, without changing a bit of it; knows no family and compares nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from day0.align.family import AlignFamily


class Recorder:
    """Values of the last forward by layer and key; see `tap.Record` for the keys."""

    def __init__(self, layers: int) -> None:
        self.layers: list[dict[str, Any]] = [{} for _ in range(layers)]
        self._layer = 0

    def forget(self) -> None:
        """Before the next forward."""
        for record in self.layers:
            record.clear()

    @contextmanager
    def watching(self, layers: nn.ModuleList, family: AlignFamily) -> Iterator[None]:
        """Looks at every forward of `layers` while open, and leaves the modules as they were."""
        with ExitStack() as stack:
            for number, layer in enumerate(layers):
                enter = layer.register_forward_pre_hook(partial(self._enter, number))
                stack.callback(enter.remove)
                for path in family.modules:
                    self._watch_module(stack, layer, path)
                for path, methods in family.methods.items():
                    for name, keys in methods.items():
                        self._watch_method(stack, layer, path, name, *keys)
            module = sys.modules[type(layers[0]).__module__]
            for name, key in family.functions.items():
                original = getattr(module, name)
                stack.callback(setattr, module, name, original)
                setattr(module, name, self._recorded(original, key))
            yield

    def _enter(self, number: int, module: nn.Module, args: Any) -> None:
        self._layer = number

    def _watch_module(self, stack: ExitStack, layer: nn.Module, path: str) -> None:
        module = find_module(layer, path)
        if module is None:
            return

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.layers[self._layer][f"{path}:in"] = args[0] if args else kwargs["hidden_states"]

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self.layers[self._layer][f"{path}:out"] = out[0] if path in ("", "self_attn") and _many(out) else out

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after).remove)

    def _watch_method(
        self, stack: ExitStack, layer: nn.Module, path: str, name: str, out_key: str, in_key: str | None
    ) -> None:
        module: Any = find_module(layer, path)
        if module is None or not hasattr(module, name):
            return
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            out, record = original(*args, **kwargs), self.layers[self._layer]
            if in_key is None:
                record[out_key] = out
            else:
                record.setdefault(in_key, []).append(args[0])
                record.setdefault(out_key, []).append(out)
            return out

        setattr(module, name, call)
        # An attribute of this object only, which hid the class's own.
        stack.callback(delattr, module, name)

    def _recorded(self, original: Callable[..., Any], key: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            record = self.layers[self._layer]
            named = {name: value for name, value in kwargs.items() if name in ("g", "beta")}
            record[f"{key}:in"] = (*args, *named.values())
            record[f"{key}:out"] = out = original(*args, **kwargs)
            return out

        return call


def find_module(layer: nn.Module, path: str) -> nn.Module | None:
    """The module below `layer`, None where this layer has none of that name."""
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def _many(value: Any) -> bool:
    return isinstance(value, tuple)
