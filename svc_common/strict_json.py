"""JSON as the standard has it, no key twice in an object; Python's own parser is more lenient."""

from __future__ import annotations

import itertools
import json
from typing import Any, NoReturn


def parse_strict_json(text: bytes | memoryview) -> Any:
    """The parsed UTF-8 text; raises ValueError for NaN, half a surrogate pair, a repeated key, endless nesting."""
    try:
        return json.loads(str(text, "utf-8"), object_pairs_hook=_checked_object, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = sorted(name for name, _ in pairs)
        raise ValueError(f"{next(a for a, b in itertools.pairwise(names) if a == b)!r} appears twice")
    for name, item in found.items():
        # Python lets half a surrogate pair through; encoding it is what fails.
        name.encode("utf-8")
        if isinstance(item, str):
            item.encode("utf-8")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
