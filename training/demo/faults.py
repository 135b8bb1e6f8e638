"""Faults that a kernel or a loader could have, each put into a checkpoint; shows whether golden logits notice.

`python -m training.demo.faults CHECKPOINT` runs upstream's float32 forward on each faulty checkpoint. A fault is a
change of tensors or of the configuration, so that any implementation can be given the same one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.demo.evaluate import run_model
from training.demo.golden import (
    GOLDEN_NAME,
    PACKED,
    SCALE,
    decode_experts,
    model_of,
    read_config,
    read_tensors,
    rendered,
)

Tensors = dict[str, Tensor]
ONE_LAYER = "layers.3."
ONE_EXPERT = "layers.3.mlp.experts.7."


@dataclass(frozen=True, slots=True)
class Fault:
    """`tensors` gives the value for each tensor whose name has `part` and `end`; `text_config` replaces entries."""

    part: str = ""
    end: str = ""
    tensors: Callable[[Tensor], Tensor] | None = None
    text_config: tuple[tuple[str, Any], ...] = ()

    def apply(self, tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        """The faulty checkpoint; what is given stays as it is. LookupError where the fault would change nothing."""
        changed = dict(tensors)
        if self.tensors is not None:
            names = [name for name in tensors if self.part in name and name.endswith(self.end)]
            changed |= {name: self.tensors(tensors[name]).contiguous() for name in names}
        text_config = config["text_config"] | dict(self.text_config)
        if text_config == config["text_config"] and all(torch.equal(changed[n], tensors[n]) for n in tensors):
            raise LookupError(f"the fault in {self.part or '*'}{self.end} changes nothing of this checkpoint")
        return changed, config | {"text_config": text_config}


def swap_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes lie in a byte, the lower first; here the higher is."""
    return (codes << 4) | (codes >> 4)


def lose_sign(codes: Tensor) -> Tensor:
    """The top bit of each code is its sign."""
    return codes & 0x77


def neighbours_scale(scales: Tensor) -> Tensor:
    """Every group of 32 takes the scale of the group before it."""
    return scales.roll(1, -1)


FAULTS: dict[str, Fault] = {
    "nibbles swapped": Fault("experts", PACKED, swap_nibbles),
    "nibbles swapped, one layer": Fault(ONE_LAYER, PACKED, swap_nibbles),
    "sign lost": Fault("experts", PACKED, lose_sign),
    "sign lost, one layer": Fault(ONE_LAYER, PACKED, lose_sign),
    "neighbour's scale": Fault("experts", SCALE, neighbours_scale),
    "neighbour's scale, one layer": Fault(ONE_LAYER, SCALE, neighbours_scale),
    "neighbour's scale, one expert": Fault(ONE_EXPERT, SCALE, neighbours_scale),
    "index weights negated": Fault("indexer", "weights_proj.weight", torch.neg),
    "index weights negated, one layer": Fault(ONE_LAYER, "weights_proj.weight", torch.neg),
    "convolution flipped": Fault("self_attn", "conv1d.weight", lambda weight: weight.flip(-1)),
    "router bias zero": Fault("mlp.gate", "e_score_correction_bias", torch.zeros_like),
    "tail lost": Fault(text_config=(("index_kpool_always_select_tail", False),)),
    "one Sinkhorn round": Fault(text_config=(("hc_sinkhorn_iters", 1),)),
}


@torch.no_grad()
def measure(model: Any, golden: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Largest difference to the golden logits by prompt, and the prompts whose most likely tokens changed."""
    found, changed = {}, []
    for prompt in golden["prompts"]:
        logits = run_model(model, [rendered(prompt)], torch.device("cpu"))[0][prompt["answer_positions"]].float()
        top_ids = torch.tensor(prompt["top_ids"])
        found[prompt["task"]] = (logits.gather(1, top_ids) - torch.tensor(prompt["top_logits"])).abs().max().item()
        if not torch.equal(logits.argmax(-1), top_ids[:, 0]):
            changed.append(prompt["task"])
    return found, changed


def main() -> None:
    """The command; status 1 where a fault is not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--max-tokens", type=int, default=1_000_000, help="leave longer golden prompts out")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    golden = json.loads((options.checkpoint / GOLDEN_NAME).read_text())
    golden["prompts"] = [prompt for prompt in golden["prompts"] if len(prompt["ids"]) <= options.max_tokens]
    tensors, config = read_tensors(options.checkpoint), read_config(options.checkpoint)
    document: dict[str, Any] = {"tolerance": golden["tolerance"], "faults": {}}
    missed = []
    for name in options.faults:
        faulty, faulty_config = FAULTS[name].apply(tensors, config)
        differences, changed = measure(model_of(faulty_config, decode_experts(faulty)), golden)
        document["faults"][name] = {"differences": differences, "answers_changed": changed}
        seen_by = [task for task, difference in differences.items() if difference > golden["tolerance"]]
        if not seen_by:
            missed.append(name)
        least, most = min(differences.values()), max(differences.values())
        print(
            f"{name:<34} {least:9.2e} to {most:9.2e}  seen by {len(seen_by)} of {len(differences)}, "
            f"changes {len(changed)} answers",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    raise SystemExit(int(bool(missed)))


if __name__ == "__main__":
    main()
