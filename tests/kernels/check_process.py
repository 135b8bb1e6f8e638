"""Runs named checks in a process of their own, where Triton interprets; knows no operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def run_checks(module: str, checks: Sequence[str]) -> dict[str, str | None]:
    """What is wrong with each check of `module`, all made by one process; None where nothing is."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        input="\n".join(checks),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    assert done.returncode == 0, done.stderr
    return {line["id"]: line["wrong"] for line in map(json.loads, done.stdout.splitlines())}


def answer_checks(kinds: Mapping[str, Callable[..., None]]) -> None:
    """The process's side: takes `kind:argument:...` lines, prints one JSON line for each."""
    torch.set_num_threads(1)
    # Uninitialised memory, scratch included, is NaN: what is never written is seen.
    torch.use_deterministic_algorithms(True)
    for line in sys.stdin.read().split():
        kind, *rest = line.split(":")
        began = time.perf_counter()
        wrong = None
        try:
            with torch.no_grad():
                kinds[kind](*rest)
        except Exception as error:  # the parent shows it as that check's failure
            wrong = f"{type(error).__name__}: {error}"
        print(json.dumps({"id": line, "wrong": wrong, "seconds": time.perf_counter() - began}), flush=True)
