"""The inventory's parameters, FLOPs and cache bytes are those that others count, and what it cannot count it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen2ForCausalLM

from day0.cli import run
from day0.inventory.definition import build
from day0.inventory.inventory import Inventory, take_inventory
from day0.inventory.quiet import quiet
from day0.inventory.source import InventoryError, ModelSource, read_model
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tools.write_inventory_page import BEGIN, END, FAMILIES, PAGE, measure

QUICK = ("gpt_oss", "kimi_linear", "longcat_flash", "qwen3_next")
DENSE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def inventory_of(config: Any, *, tokens: int = 16, dtype: torch.dtype = torch.float32) -> Inventory:
    with quiet():
        return take_inventory(ModelSource(config.model_type, "test", config), dtype, prompt_tokens=tokens)


@pytest.mark.parametrize("family", QUICK)
def test_every_parameter_and_operator_of_a_family_is_counted_once(family: str) -> None:
    with quiet():
        source = read_model(family)
        model = build(source.config, torch.bfloat16)
        found = take_inventory(source, torch.bfloat16, model=model)
    assert found.not_traced is None
    assert sum(row.parameters for row in found.modules) == found.parameters == model.num_parameters()
    for trace, phase in ((found.prefill, "prefill"), (found.decode, "decode")):
        costs = [cost for row in found.modules if (cost := getattr(row, phase)) is not None]
        whole = getattr(found.modules[0], f"{phase}_within")
        assert sum(cost.flops for cost in costs) == trace.total.flops == whole.flops > 0
        assert sum(cost.size_bytes for cost in costs) == trace.total.size_bytes == whole.size_bytes


def test_a_tied_parameter_counts_once() -> None:
    sizes = {**DENSE, "max_position_embeddings": 64}
    for tie in (True, False):
        config = Qwen2Config(**sizes, tie_word_embeddings=tie)
        found = inventory_of(config)
        real = Qwen2ForCausalLM(config).num_parameters()
        assert sum(row.parameters for row in found.modules) == found.parameters == real


def test_flops_of_a_dense_model_are_those_of_its_formula() -> None:
    tokens, layers, hidden, heads, kv_heads, head_dim, inner, vocab = 16, 2, 64, 4, 2, 16, 128, 256
    found = inventory_of(LlamaConfig(**DENSE), tokens=tokens)
    weights = layers * (2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * inner)
    products = 2 * (weights + vocab * hidden)

    def attention(queries: int, keys: int) -> int:
        return layers * 2 * 2 * heads * head_dim * queries * keys

    assert found.prefill.total.flops == products * tokens + attention(tokens, tokens)
    assert found.decode.total.flops == products + attention(1, tokens + 1)


def test_experts_cost_what_each_token_takes() -> None:
    config = MixtralConfig(**DENSE, num_local_experts=8, num_experts_per_tok=2)
    found = inventory_of(config, tokens=16)
    (experts,) = (row for row in found.modules if row.name == "MixtralExperts")
    assert experts.seam == "experts function"
    assert experts.prefill is not None and experts.decode is not None
    one_expert = 3 * 64 * 128
    assert experts.prefill.flops == 2 * 16 * 2 * 2 * one_expert
    assert experts.decode.flops == 2 * 2 * 2 * one_expert
    # Weights of two experts in each layer, the token's vector in and out; then all eight, which 16 tokens may reach.
    assert experts.decode.size_bytes == 2 * 4 * (2 * one_expert + 2 * 64)
    assert experts.prefill.size_bytes == 2 * 4 * (8 * one_expert + 2 * 16 * 64)


def test_tracing_leaves_the_definition_as_it_was() -> None:
    source = ModelSource("mixtral", "test", MixtralConfig(**DENSE, num_local_experts=8, num_experts_per_tok=2))
    model = build(source.config, torch.float32)
    take_inventory(source, torch.float32, prompt_tokens=8, model=model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_caches_grow_by_keys_and_values_and_a_window_bounds_them() -> None:
    (row,) = inventory_of(LlamaConfig(**DENSE)).caches
    assert (row.token_bytes, row.sequence_bytes, row.bound_tokens) == (2 * 2 * 2 * 16 * 4, 0, None)
    with quiet():
        sliding, full = take_inventory(read_model("gpt_oss"), torch.bfloat16).caches
    assert (sliding.bound_tokens, full.bound_tokens) == (127, None)
    assert sliding.token_bytes == full.token_bytes == 18 * 2 * 8 * 64 * 2


def test_native_caches_are_those_that_the_service_allocates(tiny_checkpoint: Path) -> None:
    source = read_model(str(tiny_checkpoint))
    with quiet():
        native = take_inventory(source, torch.float32, block_size=16).native
    assert native is not None
    settings = LlmSettings(
        model=str(tiny_checkpoint), block_size=16, cache_tokens=160, max_running_sequences=3, max_snapshots=5, threads=1
    )
    allocated = load(settings).facts.cache_bytes
    assert 160 * native.token_bytes + 3 * native.sequence_bytes + 5 * native.snapshot_bytes == allocated


def test_what_is_taken_without_values_is_said(tiny_checkpoint: Path) -> None:
    with quiet():
        found = take_inventory(read_model(str(tiny_checkpoint)), torch.float32)
    assert found.assumed["boolean selection: every element is selected"] > 0
    assert [part.split(" ")[0] for part in found.not_run] == ["model.visual"]


def test_a_definition_that_fails_on_shapes_is_not_traced_and_says_why() -> None:
    with quiet():
        found = take_inventory(read_model("glm4v_moe"), torch.bfloat16)
    assert found.not_traced is not None and "Glm4vMoeTextRotaryEmbedding" in found.not_traced
    assert sum(row.parameters for row in found.modules) == found.parameters > 1e11
    assert all(row.prefill is None for row in found.modules) and not found.caches


def write(folder: Path, content: str) -> str:
    path = folder / "config.json"
    path.write_text(content)
    return str(path)


def test_a_model_that_cannot_be_read_is_an_error_that_helps(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match=r"'gpt_os' is not among the \d+ .* near are gpt_oss"):
        read_model("gpt_os")
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(InventoryError, match=r"has no config\.json"):
        read_model(str(tmp_path))
    with pytest.raises(InventoryError, match="is no file and no folder"):
        read_model(str(tmp_path / "elsewhere.json"))
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "must hold an object, holds list"),
        ("{}", "has no model_type"),
        ('{"model_type": "glm5_nxt"}', "near are glm5_next"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "LlamaConfig refuses"),
    ):
        with pytest.raises(InventoryError, match=message):
            read_model(write(tmp_path, content))
    with pytest.raises(InventoryError, match=r"Qwen4Exp.* cannot be built from this configuration"):
        build(read_model("qwen4_exp").config, torch.bfloat16)


def test_the_command_writes_tables_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, json.dumps({"model_type": "llama", **DENSE}))
    assert run(["inventory", config, "--tokens", "16"], {}) == 0
    shown = capsys.readouterr().out
    assert "LlamaAttention" in shown and "attention" in shown and "a decode step takes" in shown
    page = tmp_path / "page.md"
    assert run(["inventory", config, "--json", "--markdown", str(page)], {}) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model_type"] == "llama" and document["prefill"]["flops"] > 0
    assert "| LlamaMLP | 2 | patch mapping |" in page.read_text()
    assert run(["inventory", "lama"], {}) == 2
    assert "near are" in capsys.readouterr().err


def test_the_page_has_a_row_for_each_of_twenty_families() -> None:
    rows = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(FAMILIES)
    assert len(FAMILIES) == 20


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_less_than_twenty_seconds_and_two_gibibytes(family: str) -> None:
    assert measure("inventory", family).within
    assert measure("gap", family, "--device", "h200").within


def test_what_stays_in_float32_is_counted_so(tiny_checkpoint: Path) -> None:
    model = build(read_model(str(tiny_checkpoint)).config, torch.bfloat16)
    kept = {name.rsplit(".", 2)[1] for name, tensor in model.named_parameters() if tensor.dtype is torch.float32}
    assert {"gate", "conv1d"} <= kept and "o_proj" not in kept
