"""From how many tokens on experts are converted: what is timed, what is chosen, and when the timing stops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from day0_kernels.comparison import same_bits
from day0_kernels.mxfp4 import encode
from day0_kernels.workspace import Workspace
from llm_svc.adopt.operators import resolve_operators
from llm_svc.adopt.packed_product import PackedProduct
from llm_svc.crossover import BUDGET_SECONDS, Crossover, measure_crossover, run_both_once
from llm_svc.expert_memory import ExpertMemory, ExpertShape
from llm_svc.expert_residency import DeviceExperts, ExpertCounts
from llm_svc.formats.mxfp4 import PackedExperts, PackedWeight

CPU = torch.device("cpu")
MEMORY = ExpertMemory(ExpertShape(experts=4, top_k=2, hidden=64, intermediate=32), layers=1, slots=0, experts_at_once=4)


@pytest.fixture
def resident() -> DeviceExperts:
    generator = torch.Generator().manual_seed(0)
    gate_up = PackedWeight(*encode(torch.randn(4, 64, 64, generator=generator)))
    found = DeviceExperts(PackedExperts(gate_up, PackedWeight(*encode(torch.randn(4, 64, 32, generator=generator)))))
    assert found.find_lossless() == 0
    return found


def product() -> PackedProduct:
    operators, resolved = resolve_operators(CPU, torch.float32)
    workspace = Workspace(CPU, resolved, {}, reserved=MEMORY.reserved, poison=True)
    return PackedProduct(operators, workspace, ExpertCounts(), convert_tokens=0, experts_at_once=4)


def scripted(durations: list[tuple[float, float]]) -> Callable[[], float]:
    """A clock under which the fused and the converted run of each count last as long as `durations` says."""
    times, now = [], 0.0
    for fused, converted in durations:
        times += [now, now + fused, now + fused + converted]
        now += fused + converted
    return iter(times).__next__


def measured(resident: DeviceExperts, durations: list[tuple[float, float]], max_tokens: int = 100) -> Crossover:
    clock = scripted(durations)
    return measure_crossover(
        product(), resident, MEMORY, max_tokens=max_tokens, dtype=torch.float32, device=CPU, clock=clock
    )


FAST, SLOW = 1e-3, 2e-3


@pytest.mark.parametrize(
    ("winning", "chosen"),
    [
        ([False, False, True, True, True], 16),
        ([True, True, True, True, True], 1),
        ([False, False, False, False, True], 100),
        ([True, False, True, False, False], 0),
        ([True, False, False, True, True], 64),
        ([False, False, False, False, False], 0),
    ],
)
def test_the_smallest_count_from_which_converting_always_wins(
    resident: DeviceExperts, winning: list[bool], chosen: int
) -> None:
    found = measured(resident, [(SLOW, FAST) if wins else (FAST, SLOW) for wins in winning])
    assert [timing.tokens for timing in found.timings] == [1, 4, 16, 64, 100]
    assert found.convert_tokens == chosen


def test_a_draw_is_no_win(resident: DeviceExperts) -> None:
    assert measured(resident, [(FAST, FAST * 0.99)] * 5).convert_tokens == 0


def test_it_stops_before_it_takes_long(resident: DeviceExperts) -> None:
    share = BUDGET_SECONDS / 10
    found = measured(resident, [(FAST, FAST), (share, share), (share, share)])
    assert [timing.tokens for timing in found.timings] == [1, 4]
    assert found.convert_tokens == 0


def test_one_token_is_all_a_batch_may_have(resident: DeviceExperts) -> None:
    assert measured(resident, [(SLOW, FAST)], max_tokens=1).convert_tokens == 1


def test_both_ways_are_really_run(resident: DeviceExperts) -> None:
    run = product()
    found = measure_crossover(run, resident, MEMORY, max_tokens=64, dtype=torch.float32, device=CPU)
    assert found.timings[0].tokens == 1
    assert all(timing.fused_seconds > 0 and timing.converted_seconds > 0 for timing in found.timings)
    assert run.counts.converted > 0


def test_where_nothing_is_measured_both_ways_have_run_once(resident: DeviceExperts) -> None:
    run = product()
    run_both_once(run, resident, MEMORY, dtype=torch.float32, device=CPU)
    assert run.counts.converted == 2 * MEMORY.shape.top_k


def test_ways_agree_on_what_is_timed(resident: DeviceExperts) -> None:
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    placed = resident.on_device(torch.tensor([0, 2, 2, 8, 9], dtype=torch.int32))
    run = product()
    fused = run(rows, placed.gate_up, placed.offsets, converts=False)
    assert same_bits(run(rows, placed.gate_up, placed.offsets, converts=True), fused)
