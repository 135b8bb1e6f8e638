"""`day0 inventory`: reads the arguments, takes the inventory and writes it in the form asked for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from day0.inventory.document import show, to_json, to_markdown
from day0.inventory.inventory import take_inventory
from day0.inventory.quiet import quiet
from day0.inventory.source import read_model


def inventory(
    model: str,
    console: Console,
    *,
    dtype: str,
    prompt_tokens: int,
    most_operators: int,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Raises InventoryError; a definition that cannot be traced is an inventory that says so."""
    with quiet():
        found = take_inventory(read_model(model), getattr(torch, dtype), prompt_tokens=prompt_tokens)
    if markdown is not None:
        markdown.write_text(to_markdown(found, most_operators=most_operators))
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        show(found, console, most_operators=most_operators)
