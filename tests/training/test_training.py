"""A mini model learns, leaves out what is not finite, and comes back from its export as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm5NextForConditionalGeneration

from day0.tiny import build_tokenizer
from tests.training.models import mini_model, router_bias, rows, upstream_logits
from training.demo.export import pack, unpack, write_checkpoint
from training.demo.forward import Inputs, TrainingForward
from training.demo.model import keeps_float32
from training.demo.optimiser import FlatParameters
from training.demo.schedule import Bucket, first_run
from training.demo.step import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
BUCKET = Bucket(48, 2, 2)


def new_trainer() -> tuple[Any, Trainer, Inputs]:
    """A mini model, its trainer on the CPU in float32, and its inputs filled with two rows."""
    model = mini_model()
    parameters = FlatParameters(model, torch.device("cpu"), torch.float32)
    trainer = Trainer(TrainingForward(model.config), parameters, router_bias(model).clone(), 2, print)
    inputs = trainer.inputs_for(BUCKET)
    for name in ("ids", "task", "images", "image_slots"):
        getattr(inputs, name).copy_(getattr(rows(model, 48, pictures=1), name))
    return model, trainer, inputs


def test_loss_falls() -> None:
    _, trainer, _ = new_trainer()
    torch.manual_seed(0)
    losses = []
    for _ in range(30):
        trainer.step(BUCKET, True, 3e-3)
        losses.append(trainer.take()["loss"])
    assert losses[0] > 5.0
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_counts() -> None:
    _, trainer, _ = new_trainer()
    trainer.step(BUCKET, True, 1e-3)
    parameters = trainer.parameters
    before = parameters.master.clone()
    name = "lm_head.weight"
    bad = {leaf: torch.zeros_like(tensor) for leaf, tensor in parameters.leaves.items()}
    bad[name] = torch.full_like(parameters.leaves[name], float("nan"))
    trainer.optimiser.step(bad)
    assert torch.equal(parameters.master, before)
    assert trainer.take()["skipped"] == 1
    trainer.step(BUCKET, True, 1e-3)
    assert trainer.take()["skipped"] == 1
    assert torch.isfinite(parameters.master).all() and not torch.equal(parameters.master, before)


def test_the_router_moves_toward_even_load() -> None:
    _, trainer, inputs = new_trainer()
    before = trainer.router_bias.clone()
    counts = trainer.forward(trainer.parameters.leaves, before, inputs, own_topk=True).counts
    trainer.step(BUCKET, True, 0.0)
    moved = trainer.router_bias - before
    # The step's pixel noise may move a token or two.
    surplus = counts - counts.mean(1, keepdim=True)
    assert (moved[surplus > 3] < 0).all() and (surplus > 3).any()
    assert (moved[surplus < -3] > 0).all() and (surplus < -3).any()


def test_an_export_comes_back(tmp_path: Path) -> None:
    model, trainer, inputs = new_trainer()
    trainer.step(BUCKET, True, 1e-3)
    write_checkpoint(
        tmp_path / "plain", model.config, build_tokenizer(640), trainer.parameters.views, trainer.router_bias
    )
    pack(tmp_path / "plain", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "again")
    loaded = Glm5NextForConditionalGeneration.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    for name, tensor in loaded.named_parameters():
        assert tensor.dtype == (torch.float32 if keeps_float32(name) else torch.bfloat16), name
    assert torch.equal(router_bias(loaded), trainer.router_bias)
    rounded = {
        name: view if keeps_float32(name) else view.bfloat16().float()
        for name, view in trainer.parameters.views.items()
    }
    with torch.no_grad():
        want = trainer.forward(rounded, trainer.router_bias, inputs, own_topk=True).logits
        got = upstream_logits(loaded.float(), inputs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_schedule() -> None:
    plan = first_run(2e-3)
    assert [plan.buckets(at)[0].length for at in (0.0, 0.1, 0.5, 0.7)] == [256, 512, 1024, 2048]
    assert {one.length for one in plan.buckets(0.9)} == {2048, 4096}
    assert {one.rows * one.length for one in plan.all_buckets()} == {49_152}
    assert not plan.own_topk(0.59) and plan.own_topk(0.6)
    assert plan.rate(0.0, 0) == pytest.approx(1e-5)
    assert plan.rate(0.5, 1000) == 2e-3
    assert plan.rate(1.0, 5000) == pytest.approx(4e-5)
    for one, own in plan.combinations():
        assert own or one.length <= 1024
