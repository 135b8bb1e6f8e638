"""Writes docs/settings.md from the settings classes of the services; knows no setting by name."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from llm_svc.settings import LlmSettings
from router_svc.settings import RouterSettings
from svc_common.settings import ServerSettings, ServiceSettings
from vision_svc.settings import VisionSettings

ROOT = Path(__file__).resolve().parents[1]
SERVICES: tuple[tuple[str, type[ServiceSettings]], ...] = (
    ("Router", RouterSettings),
    ("Vision service", VisionSettings),
    ("Language service", LlmSettings),
)
HEAD = """\
# Settings

Written by `python tools/document_settings.py`; do not edit.

A setting is the environment variable of its service: prefix, then the name in capital letters. `day0 serve` takes the
same as `--set SERVICE.NAME=VALUE`, for example `--set llm.cache_tokens=8192`. Lists are written `a,b`. All are read
once at start; an unknown name or a bad value ends the process with status 2 and a message that names the variable.
"""


def attribute_docstrings(cls: type) -> dict[str, str]:
    """What stands as a string literal below each field of the class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as words)):
                found[name] = " ".join(words.split())
    return found


def shown(field: FieldInfo) -> str:
    """A default as it would be written in a variable; the empty string as nothing."""
    if field.is_required():
        return "required"
    value: Any = field.default
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value}`" if str(value) else ""


def table(fields: dict[str, FieldInfo], docstrings: dict[str, str]) -> str:
    """Name, default, meaning of each field."""
    lines = ["| name | default | meaning |", "|---|---|---|"]
    for name, field in fields.items():
        meaning = (field.description or docstrings.get(name, "")).replace("|", "\\|")
        lines.append(f"| `{name}` | {shown(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole page."""
    common = ServerSettings.model_fields
    pieces = [HEAD, "## Every service\n", table(common, {})]
    for title, cls in SERVICES:
        own = {name: field for name, field in cls.model_fields.items() if name not in common}
        pieces += [f"## {title}: `{cls.model_config['env_prefix']}`\n", table(own, attribute_docstrings(cls))]
    return "\n".join(pieces)


def main() -> None:
    """Write the page, or where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "settings.md")
    parser.parse_args().out.write_text(document())


if __name__ == "__main__":
    main()
