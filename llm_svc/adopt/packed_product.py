"""The grouped product on MXFP4 experts in one of two ways with the same bits; it knows no gate and no layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from day0_kernels.workspace import Workspace
from llm_svc.adopt.operators import Operators
from llm_svc.adopt.rows import stacked
from llm_svc.expert_memory import FP8_SCRATCH
from llm_svc.expert_residency import ExpertCounts, PlacedWeight


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring places with rows that go the same way: rows `first` to `end` belong to `places`."""

    places: list[int]
    converts: bool
    first: int
    end: int


class PackedProduct:
    """Fused for few tokens, converted to FP8 in the workspace for many.

    Fused reads each weight once, as packed, and decodes it for each tile of rows. Converted pays for writing and
    reading FP8 once, then runs at the FP8 rate. Both decode to the same values, so that the choice changes no bit; a
    matrix that FP8 cannot hold exactly is never converted, it takes the fused product also in a converted call.
    """

    def __init__(
        self,
        operators: Operators,
        workspace: Workspace | None,
        counts: ExpertCounts,
        *,
        convert_tokens: int,
        experts_at_once: int,
    ) -> None:
        self.convert_tokens = convert_tokens
        self.counts = counts
        self._operators = operators
        self._workspace = workspace
        self._experts_at_once = experts_at_once

    def converts(self, tokens: int) -> bool:
        """Whether a forward of so many tokens converts."""
        return 0 < self.convert_tokens <= tokens

    def __call__(self, rows: Tensor, weight: PlacedWeight, offsets: Tensor, *, converts: bool) -> Tensor:
        """Rows [N, in] sorted by place with offsets int32 [P + 1] -> [N, out]."""
        if not converts:
            return self._fused(rows, weight, offsets)
        bounds = offsets.tolist()
        parts, covered = [], 0
        for stretch in _stretches(bounds, weight.lossless, self._experts_at_once):
            part = rows[stretch.first : stretch.end]
            if stretch.converts:
                parts.append(self._converted(part, weight, stretch.places, bounds))
                self.counts.converted += len(stretch.places)
            else:
                begin, end = stretch.places[0], stretch.places[-1] + 1
                parts.append(self._fused(part, _slice(weight, begin, end), offsets[begin : end + 1] - stretch.first))
                self.counts.kept_mxfp4 += len(stretch.places)
            covered = stretch.end
        # Rows of no expert lie behind all others.
        if covered < len(rows) or not parts:
            parts.append(rows.new_zeros(len(rows) - covered, weight.packed.codes.shape[1]))
        return stacked(parts)

    def _fused(self, rows: Tensor, weight: PlacedWeight, offsets: Tensor) -> Tensor:
        out: Tensor = self._operators.mxfp4_expert_gemm(rows, weight.packed.codes, weight.packed.scales, offsets)
        return out

    def _converted(self, rows: Tensor, weight: PlacedWeight, places: list[int], bounds: list[int]) -> Tensor:
        """Runs of neighbouring places are converted from where they lie: packed weights are not copied."""
        assert self._workspace is not None
        codes, scales = weight.packed.codes, weight.packed.scales
        sizes = {"experts": len(places), "rows": codes.shape[1], "columns": 2 * codes.shape[2]}
        counts = [0, *(bounds[place + 1] - bounds[place] for place in places)]
        offsets = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
        with self._workspace.lease(FP8_SCRATCH, sizes) as views:
            fp8, block_scales, done = views["fp8"], [], 0
            for begin, end in _runs(places):
                target = fp8[done : done + end - begin]
                block_scales.append(self._operators.mxfp4_to_fp8(codes[begin:end], scales[begin:end], target)[0])
                done += end - begin
            out: Tensor = self._operators.fp8_expert_gemm(rows, fp8, torch.cat(block_scales), offsets)
        return out


def _slice(weight: PlacedWeight, begin: int, end: int) -> PlacedWeight:
    packed = type(weight.packed)(weight.packed.codes[begin:end], weight.packed.scales[begin:end])
    return PlacedWeight(packed, weight.lossless[begin:end])


def _stretches(bounds: list[int], lossless: list[bool], at_once: int) -> Iterator[_Stretch]:
    """Places with rows, in order, cut where the way changes and where `at_once` converted ones are together."""
    places: list[int] = []
    for place, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            continue
        full = len(places) == at_once and lossless[place]
        if places and (full or lossless[place] != lossless[places[0]]):
            yield _stretch(places, bounds, lossless)
            places = []
        places.append(place)
    if places:
        yield _stretch(places, bounds, lossless)


def _stretch(places: list[int], bounds: list[int], lossless: list[bool]) -> _Stretch:
    return _Stretch(places, lossless[places[0]], bounds[places[0]], bounds[places[-1] + 1])


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of consecutive places."""
    begin = places[0]
    for place, following in pairwise([*places, places[-1] + 2]):
        if following != place + 1:
            yield begin, place + 1
            begin = following
