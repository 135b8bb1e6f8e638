"""A model of random weights from a config alone has the tensors of a real one, and runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from llm_svc.adopt.families import FAMILIES
from llm_svc.build import LoadError
from llm_svc.dummy import build_dummy, dummy_sizes
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tests.llm_svc.test_golden_logits import native_logits

CPU = torch.device("cpu")


@pytest.fixture
def config_alone(packed_checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copy(packed_checkpoint / "config.json", tmp_path)
    return tmp_path


def test_it_has_the_tensors_of_a_real_one_and_is_the_same_each_time(
    packed_checkpoint: Path, config_alone: Path
) -> None:
    model = load(LlmSettings(model=str(config_alone), load_format="dummy", block_size=16))
    again = load(LlmSettings(model=str(config_alone), load_format="dummy", block_size=16))
    real = load(LlmSettings(model=str(packed_checkpoint), block_size=16))
    prompt = {"ids": list(range(3, 90)), "images_png": [], "answer": [5, 6, 7]}
    logits = native_logits(model, prompt)
    assert logits.shape == native_logits(real, prompt).shape and bool(logits.isfinite().all())
    assert torch.equal(logits, native_logits(again, prompt))
    assert logits.std() > 0
    assert (model.facts.context_tokens, model.facts.vocab_size) == (real.facts.context_tokens, real.facts.vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_it_takes_is_counted_beforehand(config_alone: Path, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(config_alone)
    family = FAMILIES["glm5_next"]
    sizes = dummy_sizes(config, family, dtype)
    model = build_dummy(config, family, dtype, device=CPU, experts_device=CPU)
    packed = [module.packed for module in model.modules() if getattr(module, "packed", None) is not None]
    experts = sum(part.codes.nbytes + part.scales.nbytes for one in packed for part in (one.gate_up, one.down))
    assert sizes.packed_layers == len(packed) > 0
    assert (sizes.expert_bytes, sizes.weight_bytes) == (
        experts,
        experts + sum(parameter.nbytes for parameter in model.parameters()),
    )
    # What upstream's loading keeps in float32 is float32 here.
    assert model.model.language_model.layers[-1].mlp.gate.weight.dtype == torch.float32


def test_it_is_for_the_native_tier(config_alone: Path) -> None:
    with pytest.raises(LoadError, match="load_format: dummy is for the native tier"):
        load(LlmSettings(model=str(config_alone), load_format="dummy", tier="upstream"))
