"""A rotary scaling under its old or new names is the same scaling, and one that nobody knows is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from llm_svc.build import LoadError
from llm_svc.rope_check import check_rope
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tests.llm_svc.test_memory_check import never

YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def with_scaling(folder: Path, **entries: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config.pop("rope_scaling", None)
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


def logits(folder: Path) -> torch.Tensor:
    loaded = load(LlmSettings(model=str(folder), tier="upstream"))
    with torch.inference_mode():
        return loaded.runner.model(torch.arange(60)[None]).logits


def test_old_and_new_names_give_the_same_logits(llama: Path) -> None:
    plain = logits(with_scaling(llama, rope_scaling=None))
    assert torch.equal(logits(with_scaling(llama)), plain)
    yarn = logits(with_scaling(llama, rope_scaling={"rope_type": "yarn", **YARN}))
    assert not torch.equal(yarn, plain)
    for scaling in ({"type": "yarn", **YARN}, {"type": "yarn", "rope_type": "yarn", **YARN}):
        assert torch.equal(logits(with_scaling(llama, rope_scaling=scaling)), yarn)
    new = {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}
    assert torch.equal(logits(with_scaling(llama, rope_parameters=new)), yarn)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["dynamic9", "mrope"])
def test_an_unknown_type_is_refused_before_a_weight_is_read(llama: Path, key: str, name: str) -> None:
    with_scaling(llama, rope_scaling={key: name, "factor": 4.0})
    with pytest.raises(LoadError, match=rf"rope_parameters\.rope_type is '{name}', must be one of default, dynamic"):
        load(LlmSettings(model=str(llama), tier="upstream"), never)


def test_types_of_a_family_and_of_its_layers() -> None:
    """Qwen's mrope has no factor and no function of its own; some families scale each type of layer differently."""
    mrope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    check_rope(AutoConfig.for_model("qwen2_vl", text_config={"rope_scaling": mrope}))
    by_layer = LlamaConfig()
    by_layer.rope_parameters = {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "wobbly"}}
    with pytest.raises(ValueError, match="'wobbly'"):
        check_rope(by_layer)


def test_an_unknown_model_type_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wobbly"}))
    with pytest.raises(ValueError, match="wobbly"):
        load(LlmSettings(model=str(tmp_path), tier="upstream"), never)
