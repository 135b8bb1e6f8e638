"""A run's lines on the screen and in its JSON log; it knows no model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RunLog:
    """Prints lines with the seconds since the start and keeps everything in a JSON-lines file, flushed at once."""

    def __init__(self, path: Path, began: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")
        self.began = began

    def seconds(self) -> float:
        """Since the start, monotonic."""
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        """One line of text."""
        print(f"[{self.seconds():6.1f}s] {text}", flush=True)
        self.write({"text": text})

    def write(self, document: dict[str, Any]) -> None:
        """One JSON object, with its time."""
        self.file.write(json.dumps({"seconds": round(self.seconds(), 1), **document}) + "\n")
        self.file.flush()


def progress_line(
    values: dict[str, Any], tasks: Sequence[str], step: int, pictures: int, tokens: int, seconds: float
) -> tuple[str, dict[str, Any]]:
    """A line for the screen and an object for the log, of what `Trainer.take` gave over `seconds`."""
    steps = max(1.0, values["steps"])
    accuracy = {
        name: values["right"][index] / values["tokens"][index]
        for index, name in enumerate(tasks)
        if values["tokens"][index]
    }
    document = {
        "step": step,
        "loss": values["loss"] / steps,
        "kl": values["kl"] / steps,
        "norm": values["norm"],
        "skipped": values["skipped"],
        "tokens_per_second": tokens / seconds,
        "images_per_second": pictures / seconds,
        "accuracy": {name: round(value, 4) for name, value in accuracy.items()},
    }
    per_task = " ".join(f"{name} {value:.3f}" for name, value in accuracy.items())
    line = (
        f"step {step} loss {document['loss']:.4f} kl {document['kl']:.3f} norm {values['norm']:.2f} "
        f"skipped {values['skipped']:.0f} {tokens / seconds / 1e3:.0f}k tokens/s "
        f"{pictures / seconds:.0f} images/s | {per_task}"
    )
    return line, document
