"""Writes a gap as JSON, as Markdown and for a terminal; computes nothing."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from day0.gap.gap import Gap
from day0.gap.memory import WIDENED, WeightPlan
from day0.gap.parts import Part, Status
from day0.inventory.document import facts, markdown_table, si

_COLOURS = {
    Status.NATIVE: "green",
    Status.REFERENCE_ONLY: "yellow",
    Status.UPSTREAM_ONLY: "yellow",
    Status.MISSING: "red",
}
_PART_HEAD = ("part", "n", "kind", "status", "operators and the backend taken", "why not native")
_MEMORY_HEAD = ("weights", "tier", "held", "scratch", "longest context", "sequences by context", "with these settings")


def to_json(gap: Gap) -> dict[str, Any]:
    """Everything; the inventory has a command of its own."""
    return {
        "model_type": gap.inventory.model_type,
        "origin": gap.inventory.origin,
        "architecture": gap.inventory.architecture,
        "parameters": gap.inventory.parameters,
        "dtype": gap.inventory.dtype,
        "not_traced": gap.inventory.not_traced,
        "device": {"name": gap.device.name, "title": gap.device.title, "memory_bytes": gap.device.memory_bytes},
        "parts": [
            {
                "part": part.name,
                "kind": part.kind.name,
                "count": part.count,
                "seam": part.seam,
                "status": part.status.value,
                "why": part.why,
                "operators": [
                    {"operator": answer.operator, "chosen": answer.chosen, "refused": dict(answer.refused)}
                    for answer in part.operators
                ],
            }
            for part in gap.parts
        ],
        "memory": [
            {
                "format": plan.format,
                "tier": plan.tier,
                "held_bytes": plan.held_bytes,
                "workspace_bytes": plan.workspace_bytes,
                "cache_bytes": plan.service.cache_bytes if plan.service else None,
                "refusal": plan.refusal,
                "context_tokens": plan.context_tokens,
                "batches": {str(tokens): batch for tokens, batch in plan.batches.items()},
                "note": plan.note,
            }
            for plan in gap.memory
        ],
        "flags": [{"flag": flag.flag, "reason": flag.reason, "given": flag.given} for flag in gap.flags],
        "work": [{"cost": work.cost, "part": work.part, "what": work.what} for work in gap.work],
        "missing": gap.missing,
    }


def to_markdown(gap: Gap) -> str:
    """A page with the tables that the terminal shows."""
    parts = [f"# Gap of {gap.inventory.architecture} on {gap.device.title}", *facts(gap.inventory)]
    parts += ["## Parts", markdown_table(_PART_HEAD, [_part_cells(part) for part in gap.parts])]
    parts += ["## Memory", markdown_table(_MEMORY_HEAD, [_memory_cells(plan) for plan in gap.memory])]
    parts += [f"{plan.format}: {plan.refusal}" for plan in gap.memory if plan.refusal and plan.note != WIDENED]
    parts += ["## Settings that cannot work", "\n".join(f"- `{flag.flag}`: {flag.reason}" for flag in gap.flags)]
    work = [f"{number}. **{work.cost}** {work.part}: {work.what}" for number, work in enumerate(gap.work, 1)]
    parts += ["## Work, cheapest first", "\n".join(work) or "Nothing is left."]
    return "\n\n".join(parts) + "\n"


def show(gap: Gap, console: Console) -> None:
    """Tables, then the flags and the work."""
    table = Table(title=f"{gap.inventory.architecture} on {gap.device.title}", title_justify="left", box=SIMPLE_HEAD)
    for column in _PART_HEAD:
        table.add_column(column, justify="right" if column == "n" else "left", overflow="fold")
    for part in gap.parts:
        cells = [escape(cell) for cell in _part_cells(part)]
        cells[3] = f"[{_COLOURS[part.status]}]{cells[3]}[/]"
        table.add_row(*cells)
    console.print(table)
    memory = Table(
        title=f"Memory, {_gib(gap.device.memory_bytes)} on the device", title_justify="left", box=SIMPLE_HEAD
    )
    for column in _MEMORY_HEAD:
        memory.add_column(column, overflow="fold")
    for plan in gap.memory:
        memory.add_row(*map(escape, _memory_cells(plan)))
    console.print(memory)
    for plan in gap.memory:
        if plan.refusal is not None and plan.note != WIDENED:
            console.print(f"{plan.format}: {plan.refusal}", markup=False, highlight=False)
    for fact in facts(gap.inventory):
        console.print(fact, markup=False, highlight=False)
    console.print("\nSettings that cannot work", style="bold")
    for flag in gap.flags:
        console.print(
            f"  {flag.flag}: {flag.reason}", style="red" if flag.given else None, markup=False, highlight=False
        )
    console.print("\nWork, cheapest first", style="bold")
    for number, work in enumerate(gap.work, 1):
        console.print(f"  {number}. {work.cost}: {work.part}: {work.what}", markup=False, highlight=False)
    if not gap.work:
        console.print("  nothing is left")
    if gap.missing:
        console.print(f"\nMissing: {'; '.join(gap.missing)}", style="red", markup=False, highlight=False)


def _part_cells(part: Part) -> tuple[str, ...]:
    taken = ", ".join(f"{answer.operator}: {answer.chosen or 'none'}" for answer in part.operators)
    name = part.name if part.bound or not part.operators else f"{part.name} (not bound)"
    return name, str(part.count), part.kind.name, part.status.value, taken, part.why


def _memory_cells(plan: WeightPlan) -> tuple[str, ...]:
    batches = ", ".join(f"{batch} x {si(tokens).replace(' ', '')}" for tokens, batch in plan.batches.items())
    verdict = "starts" if plan.refusal is None else "refused"
    context = "the weights do not fit" if plan.context_tokens is None else f"{plan.context_tokens:,}"
    if plan.context_tokens is None and plan.note == "caches were not traced":
        context = plan.note
    note = f"{verdict}; {plan.note}" if plan.note else verdict
    return plan.format, plan.tier, _gib(plan.held_bytes), _gib(plan.workspace_bytes), context, batches, note


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.2f} GiB"
