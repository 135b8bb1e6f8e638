"""Measures from how many tokens on experts are better converted to FP8; the answer changes no bit of any result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llm_svc.adopt.packed_product import PackedProduct
from llm_svc.expert_memory import ExpertMemory
from llm_svc.expert_residency import PlacedExperts, ResidentExperts

BUDGET_SECONDS = 0.5
STEP = 4
# Converting has to win by more than a clock's noise: it costs memory traffic that other work could use.
WORTH_IT = 0.95


@dataclass(frozen=True, slots=True)
class Timing:
    """Both products of a layer at one number of tokens, in seconds."""

    tokens: int
    fused_seconds: float
    converted_seconds: float


@dataclass(frozen=True, slots=True)
class Crossover:
    """`convert_tokens` is the smallest measured count from which converting wins at all larger ones; 0 for never."""

    convert_tokens: int
    timings: tuple[Timing, ...]


def measure_crossover(
    product: PackedProduct,
    resident: ResidentExperts,
    memory: ExpertMemory,
    *,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Crossover:
    """Times both ways on one layer with tokens spread evenly over its experts, few tokens first.

    It ends where the next count would probably overrun `budget_seconds` of timed work; on a machine so slow that this
    happens before converting has won, the answer is never.
    """
    timings: list[Timing] = []
    spent = 0.0
    for tokens in _token_counts(max_tokens):
        inputs = _inputs(resident, memory, tokens, dtype, device)
        if not timings or device.type == "cuda":
            # The first calls load kernels, and on a GPU another count may take other ones, which are compiled.
            _run(product, *inputs, converts=False)
            _run(product, *inputs, converts=True)
        started = clock()
        _run(product, *inputs, converts=False)
        between = clock()
        _run(product, *inputs, converts=True)
        ended = clock()
        timings.append(Timing(tokens, between - started, ended - between))
        spent += ended - started
        if spent + STEP * (ended - started) > budget_seconds:
            break
    return Crossover(_smallest_winning(timings), tuple(timings))


def run_both_once(
    product: PackedProduct,
    resident: ResidentExperts,
    memory: ExpertMemory,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """For one token, where nothing is to be measured: what a first call loads or compiles is then there."""
    inputs = _inputs(resident, memory, 1, dtype, device)
    _run(product, *inputs, converts=False)
    _run(product, *inputs, converts=True)


def _token_counts(max_tokens: int) -> Iterator[int]:
    tokens = 1
    while tokens < max_tokens:
        yield tokens
        tokens *= STEP
    yield max_tokens


def _smallest_winning(timings: list[Timing]) -> int:
    chosen = 0
    for timing in reversed(timings):
        if timing.converted_seconds > WORTH_IT * timing.fused_seconds:
            break
        chosen = timing.tokens
    return chosen


def _inputs(
    resident: ResidentExperts, memory: ExpertMemory, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[PlacedExperts, torch.Tensor, torch.Tensor]:
    """Rows of so many tokens spread evenly over the experts on the device, and what stands for the gate's output."""
    count, places = tokens * memory.shape.top_k, memory.places
    rows = torch.randn(count, memory.shape.hidden, generator=torch.Generator().manual_seed(0))
    rows = rows.to(device=device, dtype=dtype)
    ends = torch.tensor([count * place // places for place in range(places + 1)], dtype=torch.int32, device=device)
    return resident.on_device(ends), rows, rows.new_ones(count, memory.shape.intermediate)


def _run(
    product: PackedProduct, placed: PlacedExperts, rows: torch.Tensor, activation: torch.Tensor, *, converts: bool
) -> None:
    product(rows, placed.gate_up, placed.offsets, converts=converts)
    product(activation, placed.down, placed.offsets, converts=converts)
    if rows.device.type == "cuda":
        torch.cuda.synchronize(rows.device)
