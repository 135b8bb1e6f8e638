"""Checks every Triton operator on this GPU in many processes, because nearly all of the time is the compiler's.

`python -m tests.gpu.run` needs no pytest; `make test-gpu` runs it. All cases of the specs and larger ones, every dtype,
in NaN-poisoned memory, twice, in a captured graph, and by parts. The exit status is 1 when anything is wrong or nothing
was checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from day0.bench.ops.processes import Answer, Job, answers
from tests.gpu.checks import DTYPES, ROUNDING, check_case, check_rounding, dtypes_of, triton_operators
from tests.gpu.more_cases import cases

# A wrong kernel can run for ever.
SECONDS_EACH = 120.0
SHOWN_ERRORS = 4


@dataclass
class Tally:
    """What became of the cases of one operator in one dtype."""

    asked: int = 0
    ran: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.ran + sum(self.refused.values()) + len(self.wrong)


Key = tuple[str, str]


def jobs_of(only: Sequence[str]) -> list[tuple[Key, str, Job]]:
    """(operator, dtype), case, and what runs it: a dtype of all operators before the next dtype of any."""
    from tests.kernels.triton_proofs import PROOFS

    wanted = lambda name: not only or any(word in name for word in only)  # noqa: E731
    made = [((ROUNDING, "all codes"), proof, Job(check_rounding, (proof,))) for proof in PROOFS if wanted(ROUNDING)]
    for dtype in DTYPES:
        for name in filter(wanted, triton_operators()):
            if dtype in dtypes_of(name):
                made += [((name, dtype), case.name, Job(check_case, (name, case.name, dtype))) for case in cases(name)]
    return made


def add(tally: Tally, case: str, answer: Answer) -> None:
    tally.seconds += answer.seconds
    if answer.cut:
        return
    if answer.wrong is not None:
        tally.wrong.append(f"{case}: {answer.wrong[:240]}")
    elif answer.value is not None:
        tally.refused[answer.value] += 1
    else:
        tally.ran += 1


def line_of(key: Key, tally: Tally) -> str:
    parts = [f"{tally.ran:>4} right", f"{len(tally.wrong)} wrong"]
    parts += [f"{count} refused ({reason})" for reason, count in tally.refused.items()]
    parts += [f"{tally.asked - tally.done} not reached"] if tally.done < tally.asked else []
    return f"{key[0]:<28}{key[1]:<10}{', '.join(parts)}  [{tally.seconds:.0f} s]"


def unchecked(tallies: Iterable[tuple[Key, Tally]]) -> list[str]:
    """Operators of which no case ran in any dtype."""
    ran: dict[str, int] = defaultdict(int)
    for (name, _), tally in tallies:
        ran[name] += tally.ran + len(tally.wrong)
    return [name for name, count in ran.items() if not count]


def document(tallies: dict[Key, Tally], seconds: float) -> dict[str, Any]:
    rows = [
        {
            "operator": name,
            "dtype": dtype,
            "right": tally.ran,
            "refused": dict(tally.refused),
            "not_reached": tally.asked - tally.done,
            "wrong": tally.wrong,
        }
        for (name, dtype), tally in tallies.items()
    ]
    device = torch.cuda.get_device_name()
    return {"device": device, "torch": torch.__version__, "seconds": round(seconds, 1), "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators whose name has one of these words in it, by commas")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=600, help="after these what is left is not reached")
    parser.add_argument("--json", type=Path, help="write the counts and errors there as well")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"nothing checked: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    began = time.monotonic()
    jobs = jobs_of([word for word in options.only.split(",") if word])
    tallies: dict[Key, Tally] = {}
    for key, _, _ in jobs:
        tallies.setdefault(key, Tally()).asked += 1
    run = answers(
        [job for _, _, job in jobs],
        options.workers,
        torch.cuda.synchronize,
        seconds=options.seconds,
        seconds_each=SECONDS_EACH,
    )
    for place, answer in run:
        key, case, _ = jobs[place]
        tally = tallies[key]
        add(tally, case, answer)
        if tally.done == tally.asked:
            print(line_of(key, tally), *(f"    {text}" for text in tally.wrong[:SHOWN_ERRORS]), sep="\n", flush=True)
    for key, tally in tallies.items():
        if tally.done < tally.asked:
            print(line_of(key, tally), *(f"    {text}" for text in tally.wrong[:SHOWN_ERRORS]), sep="\n", flush=True)
    seconds = time.monotonic() - began
    silent = unchecked(tallies.items())
    wrong = sum(len(tally.wrong) for tally in tallies.values())
    left = sum(tally.asked - tally.done for tally in tallies.values())
    print(f"{sum(tally.ran for tally in tallies.values())} cases right, {wrong} wrong, {left} not reached", end="")
    print(f", no case of {', '.join(silent)}" if silent else "", f"in {seconds:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(document(tallies, seconds), indent=1) + "\n")
    return int(bool(wrong or silent or left or not jobs))


if __name__ == "__main__":
    raise SystemExit(main())
