"""Writes an inventory as JSON, as Markdown and for a terminal; computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from day0.inventory.inventory import Inventory, ModuleRow, operators_of
from day0.inventory.operator_trace import Cost, OperatorCall, Trace

# Costs of prefill and of decode stand in one cell.
_MODULE_HEAD = ("class", "n", "seam", "own parameters", "param.", "FLOPs a token", "bytes a token")
_OPERATOR_HEAD = ("operator", "in", "calls", "shapes", "dtypes", "FLOPs a token", "bytes a token")
_CACHE_HEAD = ("cache", "layers", "tensors after the prompt", "bytes a token", "bytes a sequence", "at most tokens")
_WORDS = ("class", "seam", "own parameters", "operator", "in", "shapes", "dtypes", "cache", "tensors after the prompt")
_LONG = ("own parameters", "shapes", "tensors after the prompt")
_WIDE = 110
_LONGEST_NAME = 26


def to_json(inventory: Inventory) -> dict[str, Any]:
    """Everything, costs of whole forwards: `prompt_tokens` of prompt, then one decode step."""
    return {
        "model_type": inventory.model_type,
        "origin": inventory.origin,
        "architecture": inventory.architecture,
        "dtype": inventory.dtype,
        "parameters": inventory.parameters,
        "prompt_tokens": inventory.prompt_tokens,
        "not_traced": inventory.not_traced,
        "traced_below": inventory.traced_below,
        "not_run": list(inventory.not_run),
        "assumed": dict(inventory.assumed),
        "prefill": _cost(inventory.prefill.total),
        "decode": _cost(inventory.decode.total),
        "modules": [_module(row) for row in inventory.modules],
        "operators": {"prefill": _operators(inventory.prefill), "decode": _operators(inventory.decode)},
        "caches": [
            {
                "kind": row.kind,
                "layers": row.layers,
                "tensors": list(row.tensors),
                "token_bytes": row.token_bytes,
                "sequence_bytes": row.sequence_bytes,
                "bound_tokens": row.bound_tokens,
            }
            for row in inventory.caches
        ],
        "native_cache": None
        if inventory.native is None
        else {
            "token_bytes": inventory.native.token_bytes,
            "sequence_bytes": inventory.native.sequence_bytes,
            "snapshot_bytes": inventory.native.snapshot_bytes,
        },
    }


def to_markdown(inventory: Inventory, *, most_operators: int = 40) -> str:
    """A page with the same three tables that the terminal shows."""
    parts = [f"# {inventory.architecture} ({inventory.model_type})", "\n\n".join(facts(inventory))]
    for title, head, rows in _tables(inventory, most_operators):
        parts += [f"## {title}", markdown_table(head, rows)]
    return "\n\n".join(parts) + "\n"


def show(inventory: Inventory, console: Console, *, most_operators: int) -> None:
    """The tables, then what was not traced or was assumed. A narrow terminal gets the numbers without the shapes."""
    for title, head, rows in _tables(inventory, most_operators):
        shown = [i for i, column in enumerate(head) if console.width >= _WIDE or column not in _LONG]
        table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=SIMPLE_HEAD)
        for i in shown:
            long = head[i] in _LONG
            table.add_column(
                head[i].replace(" a ", "\na ").replace("at most ", "at most\n"),
                justify="left" if head[i] in _WORDS else "right",
                overflow="fold" if long else "ellipsis",
                no_wrap=not long,
                max_width=None if long or console.width >= _WIDE else _LONGEST_NAME,
            )
        for row in rows:
            table.add_row(*(row[i].split(" ")[0] if head[i] == "seam" else row[i] for i in shown))
        console.print(table)
    for fact in facts(inventory):
        console.print(fact, markup=False, highlight=False)


def facts(inventory: Inventory) -> list[str]:
    """What the tables stand on, in sentences."""
    said = [
        f"{inventory.parameters:,} parameters in {inventory.dtype}, from {inventory.origin}; a prompt of "
        f"{inventory.prompt_tokens} tokens, then one decode step, on the meta device."
    ]
    if inventory.not_traced:
        return [*said, f"Not traced: {inventory.not_traced}. Classes and parameters are read from the modules alone."]
    prefill, decode = inventory.prefill.total, inventory.decode.total
    if decode.calls:
        step = f"a decode step takes {si(decode.flops)}FLOP and {si(decode.size_bytes)}B"
    else:
        step = "it keeps no cache, so there is no decode step"
    said.append(
        f"A token of the prompt takes {si(prefill.flops / inventory.prompt_tokens)}FLOP and moves "
        f"{si(prefill.size_bytes / inventory.prompt_tokens)}B where every operator runs on its own; {step}."
    )
    if inventory.traced_below:
        said.append(f"Traced: {inventory.traced_below}.")
    if inventory.not_run:
        said.append(f"Not traced, a text prompt does not reach it: {'; '.join(inventory.not_run)}.")
    said += [f"Taken without values, {count} times: {what}." for what, count in inventory.assumed.items()]
    if inventory.native:
        native = inventory.native
        said.append(
            f"The native tier's caches take {native.token_bytes:,.0f} B a token, {native.sequence_bytes:,} B a "
            f"sequence and {native.snapshot_bytes:,} B a snapshot."
        )
    return said


def si(value: float) -> str:
    """Three digits and a decimal prefix: 12.3 G."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError


def _tables(inventory: Inventory, most: int) -> list[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    tokens = inventory.prompt_tokens
    tables: list[tuple[str, Sequence[str], list[tuple[str, ...]]]] = [
        (
            "Classes, costs with everything below them, prefill/decode",
            _MODULE_HEAD,
            [_module_cells(r, tokens) for r in _shown(inventory)],
        )
    ]
    for name, trace, count in (("prefill", inventory.prefill, tokens), ("decode", inventory.decode, 1)):
        rows = operators_of(trace)
        if rows:
            title = f"Operators, {name}: the {min(most, len(rows))} largest of {len(rows)}"
            tables.append((title, _OPERATOR_HEAD, [_operator_cells(call, cost, count) for call, cost in rows[:most]]))
    if inventory.caches:
        cells: list[tuple[str, ...]] = [
            (
                row.kind,
                str(row.layers),
                "; ".join(row.tensors),
                f"{row.token_bytes:,.0f}",
                f"{row.sequence_bytes:,.0f}",
                "all" if row.bound_tokens is None else f"{row.bound_tokens:,}",
            )
            for row in inventory.caches
        ]
        tables.append(("Caches of the definition, all their layers together", _CACHE_HEAD, cells))
    return tables


def _shown(inventory: Inventory) -> list[ModuleRow]:
    """Containers that only hold a list are left out; what has no parameters and costs nothing too."""
    return [row for row in inventory.modules if row.parameters_within or row.prefill_within]


def _module_cells(row: ModuleRow, tokens: int) -> tuple[str, ...]:
    phases = ((row.prefill_within, tokens), (row.decode_within, 1))
    return (
        row.name,
        str(row.count),
        row.seam,
        ", ".join((*row.shapes, *row.dtypes)),
        _short(row.parameters_within),
        "/".join("-" if cost is None else _short(cost.flops / count) for cost, count in phases),
        "/".join("-" if cost is None else _short(cost.size_bytes / count) for cost, count in phases),
    )


def _operator_cells(call: OperatorCall, cost: Cost, tokens: int) -> tuple[str, ...]:
    shapes = " ".join(str(list(shape)).replace(" ", "") for shape in call.shapes)
    dtypes = " ".join(dict.fromkeys(call.dtypes))
    flops, moved = _short(cost.flops / tokens), _short(cost.size_bytes / tokens)
    return call.name, call.caller, str(cost.calls), shapes, dtypes, flops, moved


def _short(value: float) -> str:
    return si(value).replace(" ", "")


def _module(row: ModuleRow) -> dict[str, Any]:
    return {
        "class": row.name,
        "seam": row.seam,
        "places": list(row.places),
        "count": row.count,
        "shapes": list(row.shapes),
        "dtypes": list(row.dtypes),
        "parameters": row.parameters,
        "parameters_within": row.parameters_within,
        "prefill": _cost(row.prefill),
        "prefill_within": _cost(row.prefill_within),
        "decode": _cost(row.decode),
        "decode_within": _cost(row.decode_within),
    }


def _operators(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "operator": call.name,
            "in": call.caller,
            "shapes": [list(shape) for shape in call.shapes],
            "dtypes": list(call.dtypes),
            **(_cost(cost) or {}),
        }
        for call, cost in operators_of(trace)
    ]


def _cost(cost: Cost | None) -> dict[str, int] | None:
    return None if cost is None else {"calls": cost.calls, "flops": cost.flops, "bytes": cost.size_bytes}


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(_line(cells) for cells in (head, ["---"] * len(head), *rows))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
