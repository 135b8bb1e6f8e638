"""Ablations change what they say and nothing afterwards; golden logits tell faults that answers do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from day0.quantize import quantize_checkpoint
from day0.tiny import build_tokenizer
from tests.training.models import mini_model, router_bias, weights_of
from training.demo.ablate import ABLATIONS, score, swap_images
from training.demo.evaluate import Rendered, evaluate_model, run_model
from training.demo.export import write_checkpoint
from training.demo.golden import (
    decode_experts,
    differences,
    load_decoded,
    make_golden,
    model_of,
    read_config,
    read_tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


def example(model: Any, seed: int, tokens: int = 120) -> Rendered:
    """Random ids with a random picture and a random answer of three tokens."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 600, tokens)
    ids[2:18] = model.config.image_token_id
    image = random.integers(0, 256, (1, 112, 112, 3), dtype=np.uint8)
    return Rendered("facts", ids.tolist(), random.integers(0, 600, 3).tolist(), image)


@torch.no_grad()
def logits_of(model: Any, shown: Rendered) -> torch.Tensor:
    return run_model(model, [shown], torch.device("cpu"))[0]


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name not in ("shipped", "images swapped")])
def test_an_ablation_changes_logits_and_is_undone(name: str) -> None:
    model = mini_model()
    shown = example(model, 0)
    model.ablation_middles = [60]
    before = logits_of(model, shown)
    with ABLATIONS[name].switch(model):
        assert (logits_of(model, shown) - before).abs().max() > 1e-3
    assert torch.equal(logits_of(model, shown), before)


def test_swapped_images_are_others_of_the_same_number() -> None:
    model = mini_model()
    examples = [example(model, seed) for seed in range(3)]
    swapped = swap_images(examples)
    for index in range(3):
        assert swapped[index].ids == examples[index].ids
        assert np.array_equal(swapped[index].images, examples[(index + 1) % 3].images)


@torch.no_grad()
def test_an_example_is_right_when_all_its_answer_is_greedy() -> None:
    model = mini_model()
    first, second = example(model, 0), example(model, 1, tokens=90)
    answer: list[int] = []
    for _ in range(3):
        grown = Rendered("facts", first.ids + answer, [0], first.images)
        answer.append(int(logits_of(model, grown)[0].argmax()))
    right = Rendered("facts", first.ids, answer, first.images)
    wrong = Rendered("facts", first.ids, [*answer[:2], (answer[2] + 1) % 600], first.images)
    scores = evaluate_model(model, [right, wrong, second], float("inf"))
    assert scores["facts"]["right"] == 1 and scores["facts"]["count"] == 3
    assert score(model, "shipped", [right, wrong]) == {"facts": 0.5}


def test_golden_logits_tell_a_neighbours_scale_and_one_sinkhorn_round(tmp_path: Path) -> None:
    model = mini_model()
    write_checkpoint(tmp_path / "plain", model.config, build_tokenizer(640), weights_of(model), router_bias(model))
    quantize_checkpoint(tmp_path / "plain", tmp_path / "packed")
    loaded = load_decoded(tmp_path / "packed", torch.float32)
    golden = make_golden(loaded, [example(model, 0)])
    assert max(differences(loaded, golden).values()) < 1e-4

    tensors = read_tensors(tmp_path / "packed")
    moved = tensors | {name: tensors[name].roll(1, 0) for name in tensors if name.endswith("down_proj.weight_scale")}
    faulty = model_of(read_config(tmp_path / "packed"), decode_experts(moved))
    assert max(differences(faulty, golden).values()) > golden["tolerance"]

    for layer in loaded.model.language_model.layers:
        layer.attn_hc.hc_sinkhorn_iters = layer.ffn_hc.hc_sinkhorn_iters = 1
    assert max(differences(loaded, golden).values()) > golden["tolerance"]
