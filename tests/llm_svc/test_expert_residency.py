"""Experts in host memory: bits as on the device however few the slots, the least recently used goes, all is counted."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from day0_kernels.comparison import same_bits
from llm_svc.build import LoadError
from llm_svc.cache.expert_slots import ExpertSlots
from llm_svc.expert_residency import HostExperts
from llm_svc.loading import LoadedModel
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tests.llm_svc.conftest import Sample
from tests.llm_svc.stepping import step_all
from tests.llm_svc.test_parity import request_of
from tests.loopback import LlmOnLoopback

NEW_TOKENS = 6
LAYERS, EXPERTS = 3, 8
EXPERT_BYTES = 3 * 64 * 32 // 2 + 3 * 64 * 32 // 32


def load_packed(folder: Path, **settings: Any) -> LoadedModel:
    return load(LlmSettings(model=str(folder), block_size=16, threads=1, **settings))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, 500, (length,), generator=generator).tolist() for length in (1, 20, 90)]


@pytest.fixture(scope="module")
def on_device(packed_checkpoint: Path) -> list[torch.Tensor]:
    model = load_packed(packed_checkpoint, experts_convert_tokens=0)
    assert model.facts.experts_residency == "device"
    logits = step_all(model, prompts(), NEW_TOKENS)
    assert (model.runner.expert_counts.hits, model.runner.expert_counts.misses) == (0, 0)
    return logits


@pytest.mark.parametrize("convert_tokens", [0, 1, 30])
@pytest.mark.parametrize("slots", [2, 3, 7, 8, 32])
def test_bits_are_those_of_device_residency(
    packed_checkpoint: Path, on_device: list[torch.Tensor], slots: int, convert_tokens: int
) -> None:
    settings = {"experts_residency": "host", "experts_convert_tokens": convert_tokens}
    model = load_packed(packed_checkpoint, experts_device_slots=slots, **settings)
    assert model.facts.experts_residency == "host"
    for _ in range(2):
        for mine, theirs in zip(step_all(model, prompts(), NEW_TOKENS), on_device, strict=True):
            assert same_bits(mine, theirs)
    counts = model.runner.expert_counts
    assert counts.copied_bytes == counts.misses * EXPERT_BYTES
    assert counts.hits > 0 and (counts.misses > 0) is (slots < EXPERTS)
    assert (counts.converted > 0) is (convert_tokens > 0)


def resident_layers(model: LoadedModel) -> list[HostExperts]:
    found = [getattr(module, "resident", None) for module in model.runner.model.language_model.modules()]
    layers = [resident for resident in found if resident is not None]
    assert len(layers) == LAYERS and all(isinstance(layer, HostExperts) for layer in layers)
    return layers


def test_slots_are_memory_of_their_own(packed_checkpoint: Path) -> None:
    model = load_packed(packed_checkpoint, experts_residency="host", experts_device_slots=3)
    for layer in resident_layers(model):
        assert layer.weights.gate_up.codes.shape == (3, 64, 32) and layer.weights.down.scales.shape == (3, 64, 1)
        host, slots = layer._host.gate_up.codes, layer.weights.gate_up.codes
        assert host.untyped_storage().data_ptr() != slots.untyped_storage().data_ptr()
        assert torch.equal(host[:3], slots)
    step_all(model, prompts(), NEW_TOKENS)
    for layer in resident_layers(model):
        for slot, expert in enumerate(layer._expert_in):
            assert torch.equal(layer.weights.down.codes[slot], layer._host.down.codes[expert])
        assert sorted(layer._expert_in) == sorted(layer._slots.resident)


def test_an_expert_is_copied_once_a_call(packed_checkpoint: Path) -> None:
    """Rows of all experts but one come in three parts of three slots; each row is in one part, at its expert's slot."""
    model = load_packed(packed_checkpoint, experts_residency="host", experts_device_slots=3)
    layer, counts = resident_layers(model)[0], model.runner.expert_counts
    rows_of = [4, 0, 1, 40, 2, 1, 1, 6]
    offsets = torch.tensor([0, *rows_of]).cumsum(0).int()
    owner = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(rows_of))
    found: list[int] = []
    for part in layer.placed(offsets):
        assert part.rows is not None and len(part.rows) == part.offsets[-1]
        for slot, expert in enumerate(layer._expert_in):
            mine = part.rows[part.offsets[slot] : part.offsets[slot + 1]]
            assert (owner[mine] == expert).all()
            assert torch.equal(part.gate_up.packed.codes[slot], layer._host.gate_up.codes[expert])
        found += part.rows.tolist()
    assert sorted(found) == list(range(sum(rows_of)))
    assert (counts.hits, counts.misses) == (2, 5), "experts 0 to 2 are there from the start, 1 has no row"


def test_fewer_slots_than_one_token_takes_are_refused_before_reading(packed_checkpoint: Path) -> None:
    settings = LlmSettings(
        model=str(packed_checkpoint), block_size=16, experts_residency="host", experts_device_slots=1
    )

    def never(done: int, expected: int) -> None:
        raise AssertionError("weights were read")

    with pytest.raises(ValueError, match="experts_device_slots 1 must be at least 2"):
        load(settings, never)


@pytest.mark.parametrize("tier", ["native", "upstream"])
def test_experts_that_are_not_packed_cannot_be_left_in_host_memory(tiny_checkpoint: Path, tier: str) -> None:
    with pytest.raises(LoadError, match="experts_residency: host is for MXFP4 experts"):
        load(LlmSettings(model=str(tiny_checkpoint), block_size=16, experts_residency="host", tier=tier))


def test_hits_and_misses_are_metrics(packed_checkpoint: Path, samples: list[Sample]) -> None:
    some = [sample for sample in samples if sample.name in ("text-17", "text-64")]
    settings = {"experts_residency": "host", "experts_device_slots": 4, "experts_convert_tokens": 0}
    with LlmOnLoopback(packed_checkpoint, images=False, **settings) as service:
        service.ask_all([request_of(sample) for sample in some])
        service.wait_idle()
        misses = service.metric("day0_expert_slot_misses_total")
        assert misses > 0 and service.metric("day0_expert_slot_hits_total") > 0
        assert service.metric("day0_expert_copied_bytes_total") == misses * EXPERT_BYTES


# The order in which experts leave.


def taken(slots: ExpertSlots, active: list[int]) -> list[list[tuple[int, int, bool]]]:
    return [[(use.expert, use.slot, use.missing) for use in group] for group in slots.groups(active)]


def test_the_least_recently_used_expert_leaves() -> None:
    slots = ExpertSlots(3)
    assert taken(slots, [4, 7, 9]) == [[(4, 0, True), (7, 1, True), (9, 2, True)]]
    assert taken(slots, [4]) == [[(4, 0, False)]]
    assert slots.resident == (7, 9, 4)
    assert taken(slots, [1]) == [[(1, 1, True)]]
    assert slots.resident == (9, 4, 1)
    assert taken(slots, [9, 2]) == [[(9, 2, False), (2, 0, True)]]
    assert slots.resident == (1, 9, 2)


def test_those_present_come_before_those_that_would_push_them_out() -> None:
    slots = ExpertSlots(3)
    taken(slots, [5, 6, 7])
    groups = taken(slots, [0, 1, 2, 3, 6, 7])
    assert [[expert for expert, _, _ in group] for group in groups] == [[6, 7, 0], [1, 2, 3]]
    assert [missing for _, _, missing in groups[0]] == [False, False, True]
    assert slots.resident == (1, 2, 3)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_group_never_shares_a_slot(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    slots = ExpertSlots(count)
    held: dict[int, int] = {}
    for _ in range(200):
        active = torch.randperm(8, generator=generator)[: int(torch.randint(1, 9, (), generator=generator))].tolist()
        seen = []
        for group in slots.groups(active):
            assert len({use.slot for use in group}) == len(group) <= count
            for use in group:
                assert use.missing is (held.get(use.slot) != use.expert)
                held[use.slot] = use.expert
            seen.append([use.expert for use in group])
        assert sorted(chain(*seen)) == sorted(active)
        assert set(slots.resident) == set(held.values())
