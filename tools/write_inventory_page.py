"""Measures `day0 inventory` and `day0 gap` on twenty sparse families and writes the table of docs/inventory.md.

Each command is a process of its own, as a user starts it, with all it imports. Seconds are of processor time, which
other work on the machine does not lengthen; on a quiet machine the clock shows the same. The exit status is 1 where one
takes longer or more memory than it may.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "inventory.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
FAMILIES = (
    "axk2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe",
    "glm5_next",
    "glm_moe_dsa",
    "gpt_oss",
    "hy_v4_vl",
    "inkling2",
    "kimi_k25",
    "kimi_linear",
    "llama4",
    "longcat_flash",
    "minimax_m2",
    "minimax_m3_vl",
    "mistral_large4",
    "mixtral",
    "qwen3_5_moe",
    "qwen3_next",
)
DEVICE = "h200"
MOST_SECONDS = 20.0
MOST_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Measured:
    """One command: what it printed, its seconds of processor time, and the most memory it held."""

    document: dict[str, Any]
    seconds: float
    peak_bytes: int

    @property
    def within(self) -> bool:
        """Whether it took no more than it may."""
        return self.seconds < MOST_SECONDS and self.peak_bytes < MOST_BYTES


def measure(*arguments: str) -> Measured:
    """Runs `day0 <arguments> --json`; RuntimeError where it prints no document."""
    command = [sys.executable, "-m", "day0", *arguments, "--json"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        try:
            document = json.loads(out.read())
        except ValueError:
            raise RuntimeError(f"{' '.join(command)}: {errors.read().decode(errors='replace')[-2000:]}") from None
    return Measured(document, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def row(family: str, inventory: Measured, gap: Measured) -> str:
    """One line of the table."""
    found = inventory.document
    tokens = found["prompt_tokens"]
    growing = sum(cache["token_bytes"] for cache in found["caches"] if cache["bound_tokens"] is None)
    fixed = sum(
        cache["sequence_bytes"] + cache["token_bytes"] * (cache["bound_tokens"] or 0) for cache in found["caches"]
    )
    statuses = Counter(part["status"] for part in gap.document["parts"])
    counts = "/".join(str(statuses[name]) for name in ("native", "reference only", "upstream only", "missing"))
    traced = found["not_traced"] is None
    cells = [
        family,
        found["architecture"],
        f"{found['parameters'] / 1e9:.1f}",
        str(len(found["modules"])),
        str(len(found["operators"]["prefill"])),
        f"{found['prefill']['flops'] / tokens / 1e9:.1f} / {found['decode']['flops'] / 1e9:.1f}" if traced else "-",
        f"{growing:,.0f}" if traced else "-",
        f"{fixed / 2**20:,.1f}" if traced else "-",
        f"{inventory.seconds:.1f} s, {inventory.peak_bytes / 2**20:.0f} MiB",
        counts,
        f"{gap.seconds:.1f} s, {gap.peak_bytes / 2**20:.0f} MiB",
        found["not_traced"] or found["traced_below"] or "",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


HEAD = (
    "| family | class | parameters, 10^9 | classes | operators of a prompt | GFLOP a token, prefill / decode "
    "| cache, bytes a token | cache, MiB a sequence | `day0 inventory` | native/reference/upstream/missing "
    "| `day0 gap --device h200` | not traced |"
)


def main() -> int:
    """Measures all, one after the other, and rewrites the table."""
    lines, slow = [HEAD, "|" + "---|" * HEAD.count(" | ") + "---|"], []
    for family in FAMILIES:
        inventory, gap = measure("inventory", family), measure("gap", family, "--device", DEVICE)
        lines.append(row(family, inventory, gap))
        print(lines[-1], flush=True)
        if not (inventory.within and gap.within):
            slow.append(family)
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{rest.split(END)[1]}")
    if slow:
        print(f"over {MOST_SECONDS} s or {MOST_BYTES} bytes: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
