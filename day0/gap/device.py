"""Reads what a device is from a small JSON file; asks no hardware, but for the memory of this machine's processor."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0.inventory.source import InventoryError

_FOLDER = Path(__file__).parent / "devices"
_FIELDS = ("name", "title", "type", "capability", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Device:
    """`type` is torch's; `capability` CUDA's compute capability, None elsewhere; `memory_bytes` what a process gets."""

    name: str
    title: str
    type: str
    capability: tuple[int, int] | None
    memory_bytes: int


def known_devices() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_device(name: str) -> Device:
    """`name` is one of `known_devices` or the path of such a file. A memory of 0 bytes is what this machine has left.

    Raises InventoryError.
    """
    path = Path(name) if name.endswith(".json") else _FOLDER / f"{name}.json"
    if not path.is_file():
        near = difflib.get_close_matches(name, known_devices(), n=2, cutoff=0.4)
        hint = f"; near is {' or '.join(near)}" if near else ""
        raise InventoryError(
            f"--device: {name} is not among {', '.join(known_devices())}, nor a description in a .json file{hint}"
        )
    try:
        fields = json.loads(path.read_text())
        return _device(fields)
    except (ValueError, TypeError, KeyError) as error:
        raise InventoryError(
            f"--device: {path} is no description of a device: {type(error).__name__}: {error}"
        ) from None


def _device(fields: Any) -> Device:
    if set(fields) != set(_FIELDS):
        raise ValueError(f"its fields must be {', '.join(_FIELDS)}, they are {', '.join(fields)}")
    if fields["type"] not in ("cpu", "cuda"):
        raise ValueError(f"type must be cpu or cuda, is {fields['type']!r}")
    if (fields["type"] == "cuda") != (fields["capability"] is not None):
        raise ValueError(f"capability must be two numbers for cuda and null for cpu, is {fields['capability']!r}")
    capability = None
    if fields["capability"] is not None:
        major, minor = fields["capability"]
        capability = (int(major), int(minor))
    memory_bytes = int(fields["memory_bytes"])
    if not memory_bytes:
        from llm_svc.memory_check import available_bytes

        memory_bytes = available_bytes()
    return Device(str(fields["name"]), str(fields["title"]), str(fields["type"]), capability, memory_bytes)
