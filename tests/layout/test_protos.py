"""The wire contracts keep their conventions and the committed stubs are what the generator makes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos").glob("*/v1/*.proto"))


def test_stubs_are_fresh(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_protos.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    stale = [
        str(name) for name, text in made.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text
    ]
    assert not stale, "run `make protos`"
    kept = {path.relative_to(ROOT) for path in (ROOT / "protos").rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi")}
    assert kept == set(made), "stubs whose .proto is gone"


def uncommented_fields(text: str) -> list[str]:
    """Fields, enum values but zero, rpcs, messages and services that have no comment line directly above."""
    lines = text.splitlines()
    missing = []
    for number, line in enumerate(lines):
        bare = line.strip()
        field = re.fullmatch(r"(optional |repeated )?[\w.<>, ]+ \w+ = \d+( \[.*\])?;", bare)
        value = re.fullmatch(r"[A-Z][A-Z0-9_]* = [1-9]\d*;", bare)
        block = re.match(r"(message|service|enum|rpc|oneof) \w+", bare)
        described = number > 0 and lines[number - 1].strip().startswith("//")
        # The elements of these speak for themselves: DTYPE_FLOAT32, ROLE_USER.
        plain_value = value is not None and bare.split("_")[0] in ("DTYPE", "ROLE")
        if (field or value or block) and not described and not plain_value:
            missing.append(f"{number + 1}: {bare}")
    return missing


def test_missing_comments_are_recognised() -> None:
    text = "// A.\nmessage A {\n  int32 x = 1;\n  // Y.\n  repeated bytes y = 2;\n  map<int32, float> z = 3;\n}\n"
    assert uncommented_fields(text) == ["3: int32 x = 1;", "6: map<int32, float> z = 3;"]


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_proto_conventions(path: Path) -> None:
    text = path.read_text()
    service = path.parent.parent.name
    assert f"package day0.{service}.v1;" in text
    assert not uncommented_fields(text)
    for enum in re.finditer(r"enum (\w+) \{(.*?)\}", text, re.S):
        zero = re.search(r"(\w+) = 0;", enum.group(2))
        assert zero is not None and zero.group(1).endswith("_UNSPECIFIED"), enum.group(1)


def test_there_are_four_contracts() -> None:
    assert [path.stem for path in PROTOS] == ["common", "llm", "router", "vision"]
