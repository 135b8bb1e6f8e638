"""Keeps the figures of the model in one JSON file and writes the tables of its pages from it; it measures nothing.

`python -m training.demo.card` renews the tables in the model card and in docs/bench/demo-model.md, and the manifest of
the folder that the card lies in. `--service FILE` and the like first take in what a measuring command wrote.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from day0.embedded import embedded_model
from svc_common.digests import make_manifest
from svc_common.manifest import write_manifest
from svc_common.object_store import ObjectStore
from svc_common.piece_reader import ReadLimits
from training.demo.ablate import TASKS as ABLATED
from training.demo.ablate import table as ablation_table
from training.demo.export import MAX_CHECKPOINT_BYTES, folder_bytes
from training.demo.freeze import TITLES
from training.demo.heldout import SCORES

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/bench/demo-model.json"
BENCH_PAGE = ROOT / "docs/bench/demo-model.md"
# What each part of the file came from.
PARTS = {
    "service": "day0 demo-eval --json",
    "ablations": "training.demo.ablate --json",
    "compare": "training.demo.compare --json",
    "faults": "training.demo.faults --json",
}
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def scores_table(figures: dict[str, Any]) -> str:
    """A line a score: through the services, then the float master's forward on the training machine, then the goal."""
    served = {task["name"]: task for task in figures.get("service", {}).get("tasks", [])}
    lines = ["| held out | services | float master | must reach | |", "|---|---:|---:|---:|---|"]
    for name, score in SCORES.items():
        master, task = figures["master"][name], served.get(name)
        shown = f"{task['right']} of {task['asked']}, {100 * task['score']:.1f} %" if task else "not measured"
        goal = "" if score.must_reach is None else f"{100 * score.must_reach:.0f} %"
        verdict = "" if score.must_reach is None or not task else "reached" if task["reached"] else "**below**"
        lines.append(f"| {TITLES[name]} | {shown} | {master['right']} of {master['count']} | {goal} | {verdict} |")
    return "\n".join(lines)


def ablations_table(figures: dict[str, Any]) -> str:
    """The command's table, and on how many examples it stands."""
    found = figures["ablations"]
    counts = ", ".join(f"{task} {count}" for task, count in found["counts"].items())
    return f"```\n{ablation_table(found['scores'], ABLATED)}\n```\n\nExamples: {counts}."


def compare_table(figures: dict[str, Any]) -> str:
    """Right answers of both checkpoints on the same examples, and the distance of their logits."""
    found = figures.get("compare")
    if found is None:
        return "Not measured."
    shipped, master = found["scores"]["shipped"], found["scores"]["master"]
    lines = ["| held out | of | MXFP4 experts | float master |", "|---|---:|---:|---:|"]
    lines += [
        f"| {TITLES[task]} | {score['count']} | {score['right']} | {master[task]['right']} |"
        for task, score in shipped.items()
    ]
    totals = [sum(int(of[task][what]) for task in of) for of, what in ((shipped, "count"), (shipped, "right"))]
    lines.append(f"| all | {totals[0]} | {totals[1]} | {sum(int(score['right']) for score in master.values())} |")
    distances = ", ".join(f"{task} {value:.2f}" for task, value in found["golden_distance"]["master"].items())
    own = max(found["golden_distance"]["shipped"].values())
    return (
        "\n".join(lines) + f"\n\nLargest difference of the float master to the golden logits: {distances}. "
        f"Of the shipped weights by the same forward: {own:.0e}."
    )


def faults_table(figures: dict[str, Any]) -> str:
    """A line a fault: how far golden logits move, how many prompts notice, how many answers change."""
    found = figures["faults"]
    lines = [
        "| fault | least difference | largest | prompts that notice | that answer otherwise |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, fault in found["faults"].items():
        differences = fault["differences"].values()
        seen = sum(difference > found["tolerance"] for difference in differences)
        changed = len(fault["answers_changed"])
        lines.append(
            f"| {name} | {min(differences):.2g} | {max(differences):.2g} | {seen} of {len(differences)} | {changed} |"
        )
    return "\n".join(lines)


TABLES = {
    "scores": scores_table,
    "ablations": ablations_table,
    "compare": compare_table,
    "faults": faults_table,
}


def fill(page: str, figures: dict[str, Any]) -> str:
    """The page with the text between each pair of markers renewed. KeyError for an unknown table."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]](figures) + "\n" + found[3], page)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    for part, command in PARTS.items():
        parser.add_argument(f"--{part}", type=Path, help=f"file written by {command}")
    options = parser.parse_args()
    figures = json.loads(FIGURES.read_text())
    for part in PARTS:
        if (source := getattr(options, part)) is not None:
            figures[part] = json.loads(source.read_text())
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    folder = embedded_model()
    for page in (folder / "README.md", BENCH_PAGE):
        page.write_text(fill(page.read_text(), figures))
    store = ObjectStore(str(folder))
    write_manifest(store, make_manifest(store, limits=ReadLimits(256 * 2**20)))
    total = folder_bytes(folder)
    if total > MAX_CHECKPOINT_BYTES:
        raise ValueError(f"{folder} has {total} bytes, more than {MAX_CHECKPOINT_BYTES}")
    print(f"{folder}: {total} bytes of at most {MAX_CHECKPOINT_BYTES}")


if __name__ == "__main__":
    main()
