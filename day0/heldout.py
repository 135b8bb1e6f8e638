"""Reads a held-out set: questions with pictures and the one right answer to each; knows no service.

The file is JSON lines, compressed with xz. The first line lists the tasks: `{"tasks": [{"name", "title",
"must_reach"}]}`, where `must_reach` is a share from 0 to 1 or null. Every other line is an example: `{"task", "answer",
"messages"}`; a message is `[role, parts]` and a part is `{"text": ...}` or `{"png": base64}`.
"""

from __future__ import annotations

import base64
import binascii
import json
import lzma
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0.client import image_part, text_part
from protos.common.v1 import common_pb2

_ROLES = {
    "system": common_pb2.ROLE_SYSTEM,
    "user": common_pb2.ROLE_USER,
    "assistant": common_pb2.ROLE_ASSISTANT,
}


class HeldOutError(ValueError):
    """The file is not a held-out set, or lacks a task; the message names the file and the line, or the task."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question; `must_reach` is the share of right answers it is held to, None where it is only reported."""

    name: str
    title: str
    must_reach: float | None


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with a question, and the sentence that answers it."""

    task: str
    chat: common_pb2.Chat
    answer: str


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """Tasks in the order of the table, and their examples."""

    tasks: tuple[Task, ...]
    examples: tuple[Example, ...]

    def choose(self, names: Collection[str], limit: int) -> HeldOutSet:
        """The named tasks (all, where none is named), each with its first `limit` examples (all, where it is 0).

        Raises HeldOutError for a name that is no task.
        """
        known = [task.name for task in self.tasks]
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise HeldOutError(f"--task: {', '.join(unknown)} is not among {', '.join(known)}")
        tasks = tuple(task for task in self.tasks if not names or task.name in names)
        examples = []
        for task in tasks:
            own = [example for example in self.examples if example.task == task.name]
            examples += own[:limit] if limit else own
        return HeldOutSet(tasks, tuple(examples))


def read_held_out(path: Path) -> HeldOutSet:
    """The set in the file at `path`. Raises HeldOutError, and OSError where it cannot be read."""
    try:
        first, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        tasks = tuple(
            Task(str(task["name"]), str(task["title"]), task["must_reach"]) for task in json.loads(first)["tasks"]
        )
    except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise HeldOutError(f"{path} is no held-out set: {type(error).__name__}: {error}") from error
    names = {task.name for task in tasks}
    examples = []
    for number, line in enumerate(lines, 2):
        try:
            examples.append(_example(json.loads(line), names))
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise HeldOutError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    return HeldOutSet(tasks, tuple(examples))


def _example(line: dict[str, Any], tasks: Collection[str]) -> Example:
    if line["task"] not in tasks:
        raise ValueError(f"task {line['task']!r} is not in the first line")
    messages = []
    for role, parts in line["messages"]:
        if role not in _ROLES:
            raise ValueError(f"role {role!r} is not {', '.join(_ROLES)}")
        read = [
            text_part(part["text"]) if "text" in part else image_part(base64.b64decode(part["png"], validate=True))
            for part in parts
        ]
        messages.append(common_pb2.Message(role=_ROLES[role], parts=read))
    return Example(line["task"], common_pb2.Chat(messages=messages), str(line["answer"]))
