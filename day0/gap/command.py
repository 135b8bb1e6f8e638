"""`day0 gap`: finds the gap and writes it in the form asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from day0.gap.device import read_device
from day0.gap.document import show, to_json, to_markdown
from day0.gap.gap import find_gap
from day0.inventory.quiet import quiet
from day0.inventory.source import read_model


def gap(
    model: str,
    console: Console,
    *,
    device: str,
    dtype: str,
    settings: Sequence[str],
    markdown: Path | None,
    as_json: bool,
) -> bool:
    """Whether nothing is missing. Raises InventoryError."""
    place = read_device(device)
    with quiet():
        found = find_gap(read_model(model), place, dtype, settings)
    if markdown is not None:
        markdown.write_text(to_markdown(found))
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        show(found, console)
    return not found.missing
