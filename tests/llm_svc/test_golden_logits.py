"""The embedded model gives the golden logits that came with it, and a faulty copy of it does not."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from day0.embedded import embedded_model
from llm_svc.core import ImageSpan, Prompt, PromptTokens, Request, SamplingParams, Sequence, VisualTokens
from llm_svc.loading import LoadedModel
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tests.llm_svc.packed import write
from tests.vision_svc.checkpoints import encoder_of
from training.demo.faults import FAULTS
from training.demo.golden import GOLDEN_NAME, differences, load_decoded, read_config, read_tensors
from vision_svc.encoder import Encoder
from vision_svc.encoder import VisualTokens as EncodedImage
from vision_svc.processor import PatchProcessor

# What shows a fault in little time; the indexer matters only beyond `index_topk` tokens.
SHORT = ("numbers",)
LONG = ("pairs_256_at_2k",)
# Everywhere; `training.demo.faults` also tries them in one place.
KINDS = [name for name in FAULTS if "one layer" not in name and "one expert" not in name]
CHUNK_TOKENS = 512


@cache
def golden() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((embedded_model() / GOLDEN_NAME).read_text())
    return document


@cache
def encoder() -> Encoder:
    return encoder_of(embedded_model())


@cache
def visual_tokens(image_png: str) -> VisualTokens:
    """A picture through the vision service's own processor and tower."""
    data = base64.b64decode(image_png)
    patches = PatchProcessor(embedded_model())(Image.open(io.BytesIO(data)).convert("RGB"))
    (encoded,) = encoder().encode([patches])
    assert isinstance(encoded, EncodedImage)
    rows = np.frombuffer(encoded.data, dtype=np.float32).reshape(encoded.tokens, encoded.hidden).copy()
    return VisualTokens(hashlib.sha256(data).digest(), encoded.tokens, rows)


def spans(prompt: dict[str, Any]) -> tuple[ImageSpan, ...]:
    """Where the pictures' placeholders lie."""
    image_id = read_config(embedded_model())["image_token_id"]
    places = [place for place, token in enumerate(prompt["ids"]) if token == image_id]
    found, used = [], 0
    for image_png in prompt["images_png"]:
        visual = visual_tokens(image_png)
        found.append(ImageSpan(places[used], visual))
        used += visual.count
    assert used == len(places)
    return tuple(found)


def native(checkpoint: Path, **settings: Any) -> LoadedModel:
    return load(
        LlmSettings(
            model=checkpoint,
            **settings,
            tier="native",
            threads=1,
            vision_target="unused:1",
            prefill_chunk_tokens=CHUNK_TOKENS,
            prefix_cache=False,
        )
    )


def native_logits(model: LoadedModel, prompt: dict[str, Any]) -> torch.Tensor:
    """Logits before each token of the answer: the prompt in chunks, then one step a token."""
    ids, answer = prompt["ids"], prompt["answer"]
    sequence = Sequence(
        Request("golden", (PromptTokens(tuple(ids)),), (), SamplingParams(max_tokens=len(answer))),
        Prompt(tuple(ids), spans(prompt)),
    )
    model.scheduler.add(sequence)
    rows: list[torch.Tensor] = []
    while len(rows) < len(answer):
        batch = model.scheduler.schedule()
        for row in model.runner.run(batch):
            # A runner may write the next step's logits to the same place.
            rows.append(row.clone())
            sequence.output_ids.append(answer[len(rows) - 1])
        model.scheduler.finish(batch)
    model.scheduler.remove(sequence)
    return torch.stack(rows)


def native_differences(checkpoint: Path, tasks: Collection[str] = (), **settings: Any) -> dict[str, float]:
    """Largest difference to the golden logits of each prompt, or of those of some tasks."""
    model = native(checkpoint, **settings)
    found = {}
    for prompt in golden()["prompts"]:
        if tasks and prompt["task"] not in tasks:
            continue
        logits = native_logits(model, prompt)[prompt["answer_positions"]].gather(1, torch.tensor(prompt["top_ids"]))
        found[prompt["task"]] = float((logits - torch.tensor(prompt["top_logits"])).abs().max())
    return found


def test_the_file_has_text_pictures_and_long_prompts_and_shows_right_answers() -> None:
    config, prompts = read_config(embedded_model())["text_config"], golden()["prompts"]
    assert {len(prompt["images_png"]) for prompt in prompts} >= {0, 1, 2}
    assert max(len(prompt["ids"]) for prompt in prompts) > 8 * config["index_topk"]
    for prompt in prompts:
        first = [row[0] for row in prompt["top_ids"]]
        assert first == [prompt["answer"][place] for place in prompt["answer_positions"]], prompt["task"]


def test_the_native_tier_gives_the_golden_logits() -> None:
    found = native_differences(embedded_model())
    assert max(found.values()) < golden()["tolerance"], found


def test_upstream_gives_the_golden_logits_of_short_prompts() -> None:
    short = [prompt for prompt in golden()["prompts"] if len(prompt["ids"]) < 1000]
    found = differences(load_decoded(embedded_model(), torch.float32), golden() | {"prompts": short})
    assert len(found) >= 4
    assert max(found.values()) < golden()["tolerance"], found


@pytest.mark.parametrize("name", KINDS)
def test_a_fault_is_seen(name: str, tmp_path: Path) -> None:
    source = embedded_model()
    tensors, config = FAULTS[name].apply(read_tensors(source), read_config(source))
    faulty = write(source, tmp_path / "faulty", tensors, config["quantization_config"])
    (faulty / "config.json").write_text(json.dumps(config))
    # Measuring which way experts go takes longer than the prompts.
    found = native_differences(faulty, LONG if name.startswith("index") else SHORT, experts_convert_tokens=0)
    assert found
    assert max(found.values()) > golden()["tolerance"], found
