"""The gap report: statuses by the registry's own answers, the service's own memory, flags it would refuse, and work."""

from __future__ import annotations

import json
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import JambaConfig

from day0.cli import run
from day0.gap.bound import bound_classes, float_expert_operators, packed_expert_operators
from day0.gap.device import Device, known_devices, read_device
from day0.gap.document import show
from day0.gap.gap import COMMUNITY, LIBRARY, NEW_OPERATOR, Gap, find_gap, order_work
from day0.gap.kinds import Kind
from day0.gap.memory import plan_memory
from day0.gap.parts import OperatorAnswer, Part, Status
from day0.inventory.definition import build
from day0.inventory.inventory import take_inventory
from day0.inventory.quiet import quiet
from day0.inventory.source import InventoryError, ModelSource, read_model
from day0_kernels import registry
from day0_kernels.described_device import described
from llm_svc.adopt.families import FAMILIES
from llm_svc.adopt.operators import Operators
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load

CPU = Device("cpu", "a processor", "cpu", None, 64 * 2**30)
H200, A100 = read_device("h200"), read_device("a100")


def gap_of(config: Any, device: Device, *settings: str, dtype: str = "bfloat16") -> Gap:
    with quiet():
        return find_gap(ModelSource(config.model_type, "test", config), device, dtype, settings)


@pytest.fixture
def tiny(tiny_checkpoint: Path) -> Any:
    return read_model(str(tiny_checkpoint)).config


def by_name(gap: Gap) -> dict[str, Any]:
    return {part.name: part for part in gap.parts if part.kind.name != "experts in MXFP4"}


def test_every_operator_of_the_native_tier_is_found_in_the_classes_that_call_it() -> None:
    called = {name for family in FAMILIES.values() for names in bound_classes(family).values() for name in names}
    called |= {*float_expert_operators(), *packed_expert_operators()}
    assert called >= {field.name for field in fields(Operators)}


def test_an_adopted_family_is_native_on_a_described_gpu_and_runs_references_on_a_cpu(tiny: Any) -> None:
    gap = gap_of(tiny, CPU, dtype="float32")
    gpu, cpu = by_name(gap_of(tiny, H200)), by_name(gap)
    for name in ("LinearAttention", "Attention", "Indexer", "HyperConnection", "TopkRouter"):
        on_gpu, on_cpu = gpu[f"Glm5NextText{name}"], cpu[f"Glm5NextText{name}"]
        assert on_gpu.status is Status.NATIVE, on_gpu.why
        assert on_cpu.status is Status.REFERENCE_ONLY
        assert {answer.chosen for answer in on_cpu.operators} == {"reference"}
    assert "device cpu is not among cuda" in cpu["Glm5NextTextAttention"].why
    assert not gap.missing


def test_a_device_below_the_kernels_is_refused_in_their_own_words(tiny: Any) -> None:
    part = by_name(gap_of(tiny, A100))["Glm5NextTextAttention"]
    assert part.status is Status.REFERENCE_ONLY
    assert "compute capability 8.0 is below 8.9" in part.why


def test_a_description_ends_with_its_report() -> None:
    with described((9, 0)):
        assert registry.resolve("kv_store", "cuda", torch.bfloat16).backend == "triton"
    if not torch.cuda.is_available():
        assert registry.resolve("kv_store", "cuda", torch.bfloat16).backend == "reference"


def test_backends_are_asked_at_the_models_own_sizes(tiny: Any) -> None:
    tiny.text_config.index_n_heads = 128
    part = by_name(gap_of(tiny, H200))["Glm5NextTextIndexer"]
    assert part.status is Status.REFERENCE_ONLY
    assert "HI must be at most 64, is 128" in part.why


def test_memory_is_what_the_service_counts(tiny_checkpoint: Path, tiny: Any) -> None:
    given = {"block_size": 16, "cache_tokens": 160, "max_running_sequences": 3, "max_snapshots": 5}
    gap = gap_of(tiny, CPU, *(f"{name}={value}" for name, value in given.items()), dtype="float32")
    plan = gap.memory[0]
    model = load(LlmSettings(model=str(tiny_checkpoint), threads=1, dtype="float32", **given))
    assert plan.service is not None and plan.refusal is None
    assert plan.service.cache_bytes == model.facts.cache_bytes
    parts = (model.runner.model.language_model, model.runner.model.lm_head)
    loaded = {id(tensor): tensor.nbytes for part in parts for tensor in part.parameters()}
    assert plan.held_bytes == sum(loaded.values())


def test_the_longest_context_is_the_last_that_fits(tiny: Any) -> None:
    with quiet():
        model = build(tiny, torch.float32)
        inventory = take_inventory(ModelSource("glm5_next", "test", tiny), torch.float32, model=model)
    settings = LlmSettings(model="tiny")

    def longest(memory_bytes: int) -> int | None:
        device = Device("small", "small", "cpu", None, memory_bytes)
        return plan_memory(model, inventory, tiny, device, settings)[0].context_tokens

    plan = plan_memory(model, inventory, tiny, CPU, settings)[0]
    native = inventory.native
    assert native is not None
    exact = int(plan.held_bytes + plan.workspace_bytes + native.sequence_bytes + 100 * native.token_bytes)
    assert (longest(exact), longest(exact - 1), longest(plan.held_bytes)) == (100, 99, None)
    assert longest(2**40) == tiny.text_config.max_position_embeddings


def test_a_setting_that_cannot_work_is_named_with_the_services_reason(tiny: Any) -> None:
    gap = gap_of(tiny, CPU, "block_size=18", dtype="float32")
    assert gap.flags[0].given and gap.flags[0].flag == "block_size=18"
    assert gap.flags[0].reason == "block_size 18 must be a multiple of index_kpool 4"
    assert gap.missing == ["block_size=18"]
    with pytest.raises(InventoryError, match="DAY0_LLM_BLOCK_SIZ"):
        gap_of(tiny, CPU, "block_siz=16")
    with pytest.raises(InventoryError, match="wants FIELD=VALUE, got 'block_size'"):
        gap_of(tiny, CPU, "block_size")


def test_what_no_operator_computes_is_missing_and_work_is_ordered_by_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = JambaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
    )
    gap = gap_of(config, H200)
    parts = by_name(gap)
    assert parts["JambaMambaMixer"].status is Status.MISSING
    assert parts["JambaExperts"].status is Status.UPSTREAM_ONLY and not parts["JambaExperts"].bound
    assert gap.missing == ["JambaMambaMixer (state space scan)"]
    costs = [work.cost for work in gap.work]
    assert costs == [COMMUNITY, *[LIBRARY] * (len(costs) - 1)] and len(costs) == 5
    assert any(work.part == "JambaMambaMixer" and "mamba-ssm" in work.what for work in gap.work)
    config.save_pretrained(tmp_path)
    page = tmp_path / "gap.md"
    assert run(["gap", str(tmp_path), "--device", "h200", "--json", "--markdown", str(page)], {}) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["missing"] == gap.missing
    assert "1. **community** the whole definition" in page.read_text()
    shown = StringIO()
    show(gap, Console(file=shown, width=150))
    assert "Missing: JambaMambaMixer" in shown.getvalue()


def test_work_is_ordered_by_cost_and_then_by_flops() -> None:
    def part(name: str, flops: int, operators: tuple[str, ...], status: Status) -> Part:
        answers = tuple(OperatorAnswer(operator, "triton", {}) for operator in operators)
        return Part(name, Kind(name, operators, "nothing does it"), 1, "patch mapping", False, status, answers, flops)

    parts = [
        part("Scan", 900, (), Status.MISSING),
        part("Small", 1, ("kv_store",), Status.UPSTREAM_ONLY),
        part("Large", 500, ("kv_store",), Status.UPSTREAM_ONLY),
    ]
    assert [(work.cost, work.part) for work in order_work(parts)] == [
        (COMMUNITY, "the whole definition"),
        (LIBRARY, "Large"),
        (LIBRARY, "Small"),
        (NEW_OPERATOR, "Scan"),
    ]


def test_a_device_is_one_of_ours_or_a_file_that_says_all(tmp_path: Path) -> None:
    assert {"cpu", "h200"} <= set(known_devices())
    assert all(read_device(name).memory_bytes > 0 for name in known_devices())
    with pytest.raises(InventoryError, match=r"h20 is not among .* near is h200"):
        read_device("h20")
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "title": "Mine", "type": "cuda", "capability": [12, 0], "memory_bytes": 1}')
    assert read_device(str(path)) == Device("mine", "Mine", "cuda", (12, 0), 1)
    path.write_text('{"name": "mine", "title": "Mine", "type": "tpu", "capability": null, "memory_bytes": 1}')
    with pytest.raises(InventoryError, match="type must be cpu or cuda, is 'tpu'"):
        read_device(str(path))
    path.write_text('{"name": "mine"}')
    with pytest.raises(InventoryError, match="its fields must be name, title"):
        read_device(str(path))
