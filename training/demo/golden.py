"""Golden logits: what upstream's unmodified forward says in float32 of the decoded weights; it knows no service.

Answers catch gross faults only. A neighbour's scale or one Sinkhorn round changes no answer, but it changes logits.
`python -m training.demo.golden CHECKPOINT --write` makes the file, without `--write` it compares.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from day0_kernels import mxfp4
from training.demo.evaluate import Rendered, run_model

GOLDEN_NAME = "golden-logits.json"
TOLERANCE = 1e-2
TOP = 32
POSITIONS = 6
SEED = 11
# Score, and how many of its examples: text, pictures, and prompts longer than what one query may attend to.
CHOSEN = {"facts": 1, "sums": 1, "shapes": 1, "numbers": 1, "two_pictures": 1, "pairs_256_at_2k": 1, "needle_4k": 1}
PACKED, SCALE = "weight_packed", "weight_scale"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder by name."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a checkpoint folder as it stands in the file."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def decode_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with each MXFP4 matrix as `...weight` in bfloat16, which holds every such value exactly."""
    decoded = {name: t for name, t in tensors.items() if not name.endswith((PACKED, SCALE))}
    for name, codes in tensors.items():
        if name.endswith(PACKED):
            module = name.removesuffix(PACKED)
            decoded[module + "weight"] = mxfp4.decode(codes, tensors[module + SCALE], torch.float32).bfloat16()
    return decoded


def model_of(config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Any:
    """Upstream's model in `dtype` of a configuration and these unquantised tensors, by upstream's own loader."""
    from transformers import Glm5NextForConditionalGeneration

    config = {name: value for name, value in config.items() if name != "quantization_config"}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        save_file(tensors, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        model = Glm5NextForConditionalGeneration.from_pretrained(scratch, dtype=dtype, experts_implementation="eager")
    return model.eval()


def load_decoded(folder: Path, dtype: torch.dtype) -> Any:
    """Upstream's model of a checkpoint with MXFP4 experts."""
    return model_of(read_config(folder), decode_experts(read_tensors(folder)), dtype)


@torch.no_grad()
def make_golden(model: Any, examples: Sequence[Rendered]) -> dict[str, Any]:
    """The document of the file: prompts whole, and the top 32 logits at the last answer positions of each."""
    prompts = []
    for example in examples:
        logits = run_model(model, [example], torch.device("cpu"))[0][-POSITIONS:].float()
        top = logits.topk(TOP, -1)
        prompts.append(
            {
                "task": example.task,
                "ids": example.ids,
                "answer": example.answer,
                "images_png": [to_png(image) for image in example.images],
                "answer_positions": list(range(len(example.answer)))[-POSITIONS:],
                "top_ids": top.indices.tolist(),
                "top_logits": [[round(value, 5) for value in row] for row in top.values.tolist()],
            }
        )
    return {
        "about": "top logits of upstream's float32 forward, teacher-forced; row n predicts answer[answer_positions[n]]",
        "tolerance": TOLERANCE,
        "prompts": prompts,
    }


def rendered(prompt: dict[str, Any]) -> Rendered:
    """A prompt of the file as an example."""
    images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in prompt["images_png"]]
    pixels = np.stack(images) if images else np.zeros((0, 112, 112, 3), dtype=np.uint8)
    return Rendered(prompt["task"], prompt["ids"], prompt["answer"], pixels)


@torch.no_grad()
def differences(model: Any, golden: dict[str, Any]) -> dict[str, float]:
    """Largest difference to the golden logits, by prompt; more than `tolerance` is a fault."""
    found = {}
    for prompt in golden["prompts"]:
        logits = run_model(model, [rendered(prompt)], next(model.parameters()).device)[0]
        got = logits[prompt["answer_positions"]].float().cpu().gather(1, torch.tensor(prompt["top_ids"]))
        found[prompt["task"]] = (got - torch.tensor(prompt["top_logits"])).abs().max().item()
    return found


def to_png(image: np.ndarray) -> str:
    """A picture as PNG in base64."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def chosen_examples() -> list[Rendered]:
    """The prompts the file is made of."""
    from training.demo.evaluate import as_pixels
    from training.demo.heldout import examples, render
    from training.demo.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    found = []
    for task, count in CHOSEN.items():
        for example in examples(task, count, SEED):
            ids, answer, images = render(example, tokenizer)
            found.append(Rendered(task, list(ids), list(answer), as_pixels(images)))
    return found


def write_golden(folder: Path) -> Path:
    """Writes the file into a checkpoint folder with MXFP4 experts."""
    path = folder / GOLDEN_NAME
    path.write_text(json.dumps(make_golden(load_decoded(folder, torch.float32), chosen_examples())) + "\n")
    return path


def main() -> None:
    """The command; status 1 where a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write:
        print(write_golden(options.checkpoint))
        return
    golden = json.loads((options.checkpoint / GOLDEN_NAME).read_text())
    found = differences(load_decoded(options.checkpoint, torch.float32), golden)
    for task, difference in found.items():
        print(f"{task:<20} {difference:.2e}")
    raise SystemExit(int(max(found.values()) > golden["tolerance"]))


if __name__ == "__main__":
    main()
