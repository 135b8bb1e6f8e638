"""Puts the inventory of a definition together: its classes, operators and caches, with what a token costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from day0.inventory.caches import CacheRow, NativeCache, native_cache, upstream_rows
from day0.inventory.definition import build, seam_of
from day0.inventory.operator_trace import Cost, OperatorCall, Trace, tracing
from day0.inventory.source import ModelSource
from llm_svc.adopt.families import FAMILIES

DEFAULT_PROMPT_TOKENS = 128
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Modules of one class with the same own parameters.

    `parameters` are its own, `parameters_within` those of everything below too, both of all `count` modules; a tied
    parameter belongs to the first that has it. `places` are paths with a star for each layer number. The costs are of
    one whole prompt and of one decode step, None where no text prompt runs it.
    """

    name: str
    seam: str
    places: tuple[str, ...]
    count: int
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    parameters: int
    parameters_within: int
    prefill: Cost | None
    prefill_within: Cost | None
    decode: Cost | None
    decode_within: Cost | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """A definition at `prompt_tokens` of prompt; `not_traced` says why there are no costs, where there are none.

    `assumed` are decisions upstream takes by value, which shapes alone cannot take; `not_run` are parts with
    parameters that a text prompt does not reach.
    """

    model_type: str
    origin: str
    architecture: str
    dtype: str
    parameters: int
    prompt_tokens: int
    modules: tuple[ModuleRow, ...]
    prefill: Trace
    decode: Trace
    caches: tuple[CacheRow, ...]
    native: NativeCache | None
    not_traced: str | None
    traced_below: str | None
    not_run: tuple[str, ...]

    @property
    def assumed(self) -> Counter[str]:
        """How often each decision was taken."""
        return self.prefill.assumed + self.decode.assumed


@dataclass(slots=True)
class _Costs:
    prefill: Trace
    decode: Trace
    caches: tuple[CacheRow, ...]
    not_traced: str | None = None
    traced_below: str | None = None


def take_inventory(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS,
    block_size: int = 64,
    model: nn.Module | None = None,
) -> Inventory:
    """Reads the modules, and runs a prompt of `prompt_tokens` and one decode step on meta tensors.

    `block_size` is that of the native tier's caches. InventoryError where the configuration makes no model.
    """
    model = model or build(source.config, dtype)
    keys = {module: _key(module) for module in model.modules()}
    costs = _run(model, keys, prompt_tokens)
    family = FAMILIES.get(source.config.model_type)
    return Inventory(
        model_type=source.config.model_type,
        origin=source.origin,
        architecture=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        prompt_tokens=prompt_tokens,
        modules=_modules(model, keys, costs),
        prefill=costs.prefill,
        decode=costs.decode,
        caches=costs.caches,
        native=native_cache(family, source.config.get_text_config(), dtype, block_size) if family else None,
        not_traced=costs.not_traced,
        traced_below=costs.traced_below,
        not_run=() if costs.not_traced else tuple(_not_run(model, costs.prefill)),
    )


def operators_of(trace: Trace) -> list[tuple[OperatorCall, Cost]]:
    """The most FLOPs first, then the most bytes."""
    return sorted(trace.operators.items(), key=lambda item: (-item[1].flops, -item[1].size_bytes, item[0].name))


def _run(model: Any, keys: dict[nn.Module, str], tokens: int) -> _Costs:
    """Whole model first; where its wrapper fails on a text prompt its decoder and head; else the reason."""
    nothing = _Costs(Trace(), Trace(), ())
    try:
        return _forwards(model, model, None, keys, tokens)
    except Exception as error:  # a definition may fail on shapes alone in any way; the inventory says how
        reason = _reason(error)
    decoder, head = model.get_decoder() if hasattr(model, "get_decoder") else model, model.get_output_embeddings()
    if decoder is not None and decoder is not model:
        try:
            costs = _forwards(model, decoder, head, keys, tokens)
            costs.traced_below = f"{type(decoder).__name__} and the head alone: {type(model).__name__}: {reason}"
            return costs
        except Exception as error:
            reason = _reason(error)
    nothing.not_traced = reason
    return nothing


def _forwards(model: Any, run: Any, head: Any, keys: dict[nn.Module, str], tokens: int) -> _Costs:
    def forward(count: int, cache: Any = None) -> tuple[Trace, Any]:
        ids = torch.zeros(1, count, dtype=torch.long, device="meta")
        with tracing(model, keys) as trace:
            past = {} if cache is None else {"past_key_values": cache}
            out = run(input_ids=ids, use_cache=True, **past)
            if head is not None and out.get("last_hidden_state") is not None:
                head(out.last_hidden_state)
        found = next(
            (out[name] for name in ("cache", "past_key_values", "cache_params") if out.get(name) is not None), None
        )
        return trace, found

    prefill, short = forward(tokens)
    _, long = forward(2 * tokens)
    rows = upstream_rows(short, long, tokens) if short is not None else ()
    decode, _ = forward(1, short) if short is not None else (Trace(), None)
    return _Costs(prefill, decode, rows)


def _reason(error: Exception) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/transformers/models/" in code.co_filename:
            place = f" in {code.co_qualname}"
        trace = trace.tb_next
    return f"{type(error).__name__}{place}: {str(error).splitlines()[0][:200] if str(error) else 'no message'}"


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _key(module: nn.Module) -> str:
    shapes = ", ".join(f"{name} {list(p.shape)} {p.dtype}" for name, p in _own(module).items())
    return f"{type(module).__name__}({shapes})"


def _modules(model: nn.Module, keys: dict[nn.Module, str], costs: _Costs) -> tuple[ModuleRow, ...]:
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        groups.setdefault(keys[module], []).append((path, module))
    counted: set[int] = set()
    own_counts: dict[nn.Module, int] = {}
    for module in model.modules():
        new = [parameter for parameter in _own(module).values() if id(parameter) not in counted]
        counted |= {id(parameter) for parameter in new}
        own_counts[module] = sum(parameter.numel() for parameter in new)
    rows = []
    for key, members in groups.items():
        first = members[0][1]
        rows.append(
            ModuleRow(
                name=type(first).__name__,
                seam=seam_of(type(first)),
                places=tuple(dict.fromkeys(_INDEX.sub("*", path) for path, _ in members)),
                count=len(members),
                shapes=tuple(f"{name} {list(p.shape)}" for name, p in _own(first).items()),
                dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in _own(first).values()})),
                parameters=sum(own_counts[module] for _, module in members),
                parameters_within=sum(sum(own_counts[m] for m in module.modules()) for _, module in members),
                prefill=costs.prefill.own.get(key),
                prefill_within=costs.prefill.within.get(key),
                decode=costs.decode.own.get(key),
                decode_within=costs.decode.within.get(key),
            )
        )
    return tuple(rows)


def _not_run(model: nn.Module, trace: Trace) -> list[str]:
    """The outermost modules with parameters under which nothing ran; a star stands for layer numbers."""
    skipped: list[str] = []
    found: dict[tuple[str, str], int] = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        inside: Iterable[object] = (*module.modules(), *parameters)
        if not parameters or any(path.startswith(f"{above}.") for above in skipped):
            continue
        if any(id(part) in trace.ran for part in inside):
            continue
        skipped.append(path)
        kind = (_INDEX.sub("*", path), type(module).__name__)
        found[kind] = found.get(kind, 0) + sum(parameter.numel() for parameter in parameters)
    return [f"{path} ({name}, {count:,} parameters)" for (path, name), count in found.items()]
