"""Where the packed experts of one layer live, and how a call finds them on the device; it multiplies nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from day0_kernels.mxfp4 import lossless_experts
from llm_svc.cache.expert_slots import ExpertSlots
from llm_svc.formats.mxfp4 import PackedExperts, PackedWeight


@dataclass(slots=True)
class ExpertCounts:
    """What happened to packed experts since the start, over all layers.

    `hits` and `misses` of the device slots count an expert once for each call of its layer that takes it;
    `copied_bytes` went from host memory into slots. `converted` matrices went through FP8, `kept_mxfp4` ones took the
    MXFP4 product in a converted call because FP8 would have to round them; an expert has two matrices.
    """

    hits: int = 0
    misses: int = 0
    copied_bytes: int = 0
    converted: int = 0
    kept_mxfp4: int = 0


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """One matrix for each of P places on the device, and which of those FP8 holds exactly."""

    packed: PackedWeight
    lossless: list[bool]


@dataclass(frozen=True, slots=True)
class PlacedExperts:
    """The experts of one part of a call.

    `offsets` int32 [P + 1] over the part's rows, sorted by place; `rows` int64 are those rows in the call's order,
    sorted by expert, or None where the part is the whole call.
    """

    gate_up: PlacedWeight
    down: PlacedWeight
    offsets: Tensor
    rows: Tensor | None


class ResidentExperts(Protocol):
    """The experts of one layer."""

    @property
    def weights(self) -> PackedExperts:
        """What is on the device, by place."""

    def placed(self, offsets: Tensor) -> Iterator[PlacedExperts]:
        """A call's rows, sorted by expert with offsets int32 [E + 1], part by part; a part is valid until the next."""

    def on_device(self, offsets: Tensor) -> PlacedExperts:
        """What is on the device now, for made-up rows sorted by place with offsets int32 [P + 1]."""

    def find_lossless(self) -> int:
        """Finds out which experts FP8 holds exactly, and gives the number of those it does not. Reads all scales."""


class DeviceExperts:
    """All experts are on the device: a call is one part."""

    def __init__(self, packed: PackedExperts) -> None:
        self.weights = packed
        self._lossless = _Lossless.none(packed)

    def placed(self, offsets: Tensor) -> Iterator[PlacedExperts]:
        """The whole call."""
        yield self.on_device(offsets)

    def on_device(self, offsets: Tensor) -> PlacedExperts:
        """All experts."""
        gate_up = PlacedWeight(self.weights.gate_up, self._lossless.gate_up)
        return PlacedExperts(gate_up, PlacedWeight(self.weights.down, self._lossless.down), offsets, None)

    def find_lossless(self) -> int:
        """As the protocol says."""
        self._lossless = _Lossless.of(self.weights)
        return self._lossless.exceeding


class HostExperts:
    """All experts are in host memory, the active ones in slots on the device; page-locked where the device is a GPU.

    Copies and products run in the device's one stream, so a slot is never overwritten before its last product is over.
    """

    def __init__(self, packed: PackedExperts, slots: int, device: torch.device, counts: ExpertCounts) -> None:
        self.weights = _map(packed, lambda tensor: tensor.new_empty(slots, *tensor.shape[1:], device=device))
        self._host = _map(packed, Tensor.pin_memory) if device.type == "cuda" else packed
        self._slots = ExpertSlots(slots)
        self._expert_in = [-1] * slots
        self._counts = counts
        self._lossless = _Lossless.none(packed)
        # Every slot holds a real expert from the start, so that measuring the products needs no special case.
        for use in next(self._slots.groups(list(range(slots)))):
            self._copy(use.expert, use.slot)

    def placed(self, offsets: Tensor) -> Iterator[PlacedExperts]:
        """As many parts as it takes to have each active expert in a slot once."""
        bounds = offsets.tolist()
        owned = {expert: span for expert, span in enumerate(pairwise(bounds)) if span[0] < span[1]}
        for uses in self._slots.groups(list(owned)):
            for use in uses:
                if use.missing:
                    self._counts.misses += 1
                    self._counts.copied_bytes += self._copy(use.expert, use.slot)
                else:
                    self._counts.hits += 1
            yield self._part({use.slot: owned[use.expert] for use in uses}, offsets.device)

    def on_device(self, offsets: Tensor) -> PlacedExperts:
        """The experts in the slots."""
        gate_up = [self._lossless.gate_up[expert] for expert in self._expert_in]
        down = [self._lossless.down[expert] for expert in self._expert_in]
        return PlacedExperts(
            PlacedWeight(self.weights.gate_up, gate_up), PlacedWeight(self.weights.down, down), offsets, None
        )

    def find_lossless(self) -> int:
        """As the protocol says."""
        self._lossless = _Lossless.of(self._host)
        return self._lossless.exceeding

    def _part(self, spans: dict[int, tuple[int, int]], device: torch.device) -> PlacedExperts:
        """The part of a call whose rows `spans` gives by slot, as first and end in the call's order."""
        rows: list[int] = []
        ends = [0]
        for slot in range(len(self._expert_in)):
            rows.extend(range(*spans.get(slot, (0, 0))))
            ends.append(len(rows))
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        return replace(self.on_device(offsets), rows=torch.tensor(rows, dtype=torch.int64, device=device))

    def _copy(self, expert: int, slot: int) -> int:
        """Brings an expert into a slot; gives the bytes."""
        copied = 0
        for source, target in zip(_tensors(self._host), _tensors(self.weights), strict=True):
            target[slot].copy_(source[expert], non_blocking=True)
            copied += source[expert].nbytes
        self._expert_in[slot] = expert
        return copied


@dataclass(frozen=True, slots=True)
class _Lossless:
    """Per expert and matrix: whether FP8 with one scale a block holds it exactly."""

    gate_up: list[bool]
    down: list[bool]

    @classmethod
    def none(cls, packed: PackedExperts) -> _Lossless:
        """Before it was looked at, nothing may be converted."""
        experts = len(packed.gate_up.codes)
        return cls([False] * experts, [False] * experts)

    @classmethod
    def of(cls, packed: PackedExperts) -> _Lossless:
        return cls(
            lossless_experts(packed.gate_up.codes, packed.gate_up.scales).tolist(),
            lossless_experts(packed.down.codes, packed.down.scales).tolist(),
        )

    @property
    def exceeding(self) -> int:
        """Experts with a matrix that FP8 does not hold exactly."""
        return sum(not (gate_up and down) for gate_up, down in zip(self.gate_up, self.down, strict=True))


def _tensors(packed: PackedExperts) -> tuple[Tensor, ...]:
    return packed.gate_up.codes, packed.gate_up.scales, packed.down.codes, packed.down.scales


def _map(packed: PackedExperts, change: Callable[[Tensor], Tensor]) -> PackedExperts:
    gate_codes, gate_scales, down_codes, down_scales = map(change, _tensors(packed))
    return PackedExperts(PackedWeight(gate_codes, gate_scales), PackedWeight(down_codes, down_scales))
