"""Makes the tensors of a case, with ids at their edges and NaN where no correct backend looks; it knows no operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from day0_kernels.spec import FLOAT, Case, Fill, Operator, Role, TensorSpec, shape_of

PADDED_SLOT = -1


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of one call by name; `tensors` and `scalars` are those of the operator's spec."""

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Any]

    def copy(self) -> Inputs:
        """The same arguments in tensors of their own, for a second run."""
        return Inputs({name: tensor.clone() for name, tensor in self.tensors.items()}, self.scalars)


class _Maker:
    """Fills the tensors of one case; everything random comes from one seeded generator."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.sizes = case.sizes
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.ends = [start + new for start, new in zip(case.start_positions, case.new_tokens, strict=True)]
        if "num_blocks" in self.sizes:
            self.block_table = self._allocate_blocks()
            self.sizes["max_blocks"] = self.block_table.shape[1]
        if "states" in self.sizes:
            self.state_slots = self._allocate_states()

    def _edges_first(self, count: int) -> list[int]:
        """A permutation of `count` ids that begins with the first and the last (by seed the other way round)."""
        order = [i for i in torch.randperm(count, generator=self.generator).tolist() if i not in (0, count - 1)]
        edges = [0, count - 1] if count > 1 else [0]
        return (edges if self.seed % 2 == 0 else edges[::-1]) + order

    def _allocate_blocks(self) -> Tensor:
        size, free = self.sizes["block_size"], self._edges_first(self.sizes["num_blocks"])
        counts = [-(-end // size) for end in self.ends]
        if sum(counts) > len(free):
            raise ValueError(f"case {self.case.name} needs {sum(counts)} blocks, num_blocks is {len(free)}")
        # One column more than any sequence needs, so that every table has padding.
        table = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
        for b, count in enumerate(counts):
            for column in range(count):
                table[b, column] = free.pop(0)
        return table

    def _allocate_states(self) -> Tensor:
        sequences = len(self.case.new_tokens)
        slots = self._edges_first(self.sizes["states"])
        if sequences > len(slots):
            raise ValueError(f"case {self.case.name} needs {sequences} state slots, states is {len(slots)}")
        taken = torch.tensor(slots[:sequences], dtype=torch.int32)
        taken[: self.case.padded_sequences] = PADDED_SLOT
        return taken

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def make(self, spec: TensorSpec) -> Tensor:
        made = _FILLS[spec.fill](self, spec, shape_of(spec, self.sizes))
        assert made.shape == shape_of(spec, self.sizes), f"{spec.name}: made {tuple(made.shape)}"
        return made

    def slots(self, b: int, positions: Tensor, unit: int = 1) -> Tensor:
        """Cache rows of positions of sequence b, where a row covers `unit` positions."""
        size = self.sizes["block_size"]
        return self.block_table[b].long()[positions // size] * (size // unit) + positions % size // unit


def _log_gate(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    gate = -5 * torch.sigmoid(3 * maker.normal(shape))
    pick = torch.rand(shape, generator=maker.generator)
    return gate.masked_fill(pick < 0.1, 0.0).masked_fill(pick > 0.9, -5.0)


def _rate(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    rate = torch.sigmoid(2 * maker.normal(shape))
    pick = torch.rand(shape, generator=maker.generator)
    return rate.masked_fill(pick < 0.1, 0.0).masked_fill(pick > 0.9, 1.0)


def _cu_seqlens(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *maker.case.new_tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _slot_mapping(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    mapping = torch.tensor(maker._edges_first(maker.sizes["num_blocks"] * maker.sizes["block_size"])[: shape[0]])
    mapping = mapping[torch.randperm(len(mapping), generator=maker.generator)].int()
    for i in range(2, len(mapping), 3):
        if mapping[i] not in (0, maker.sizes["num_blocks"] * maker.sizes["block_size"] - 1):
            mapping[i] = -1
    mapping[: sum(maker.case.new_tokens[: maker.case.padded_sequences])] = -1
    return mapping


def _topk_indices(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Ascending positions with the first and the last, -1 behind; every third row shuffled, every fifth row empty."""
    rows, width = shape
    out = torch.full((rows, width), -1, dtype=torch.int32)
    row = 0
    for start, new in zip(maker.case.start_positions, maker.case.new_tokens, strict=True):
        for position in range(start, start + new):
            count = min(width, position + 1)
            if position >= 0 and row % 5 != 4:
                middle = torch.randperm(max(position - 1, 0), generator=maker.generator)[: max(count - 2, 0)] + 1
                chosen = sorted({*middle.tolist(), position, *([0] if count > 1 else [])})
                out[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
                if row % 3 == 2:
                    out[row] = out[row][torch.randperm(width, generator=maker.generator)]
            row += 1
    return out


def _expert_offsets(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *maker.case.expert_rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _expert_ids(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """The first expert, the last and others; every third is no expert's, on either side."""
    experts = maker.sizes["E"]
    ids = torch.tensor(maker._edges_first(experts))[torch.arange(shape[0] * shape[1]) % experts]
    ids[2::3] = torch.where(torch.rand(len(ids[2::3]), generator=maker.generator) < 0.5, -1, experts)
    if len(ids) > 3:
        ids = torch.cat([ids[:2], ids[2:][torch.randperm(len(ids) - 2, generator=maker.generator)]])
    return ids.view(shape)


def _row_places(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Rows in any order, the first and the last among them, and every third place without one."""
    places = torch.tensor(maker._edges_first(shape[0] * shape[1])) if shape[0] else torch.empty(0)
    places[2::3] = -1
    if len(places) > 3:
        places = places[torch.randperm(len(places), generator=maker.generator)]
    return places.view(shape)


def _latent_cache(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    cache = torch.full(shape, torch.nan)
    for b, end in enumerate(maker.ends):
        if end > 0:
            cache[maker.slots(b, torch.arange(end))] = maker.normal((end, *shape[1:]))
    return cache


def _pool_cache(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Keys of the pools complete before the call, or with it where the call only reads."""
    cache, pool = torch.full(shape, torch.nan), maker.sizes["P"]
    bounds = maker.case.start_positions if spec.role is Role.CACHE else maker.ends
    for b, bound in enumerate(bounds):
        first = torch.arange(max(bound, 0) // pool) * pool
        cache[maker.slots(b, first, pool)] = maker.normal((len(first), shape[1]))
    return cache


def _pool_tail(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    tail = torch.full(shape, torch.nan)
    for b, start in enumerate(maker.case.start_positions):
        slot, kept = int(maker.state_slots[b]), start % maker.sizes["P"]
        if slot != PADDED_SLOT:
            tail[slot, :kept] = maker.normal((kept, *shape[2:]))
    return tail


def _state_cache(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Zeros for a sequence that begins, random values for one that goes on."""
    cache = torch.full(shape, torch.nan)
    for b, start in enumerate(maker.case.start_positions):
        slot = int(maker.state_slots[b])
        if slot != PADDED_SLOT:
            cache[slot] = maker.normal(shape[1:]) if start else torch.zeros(shape[1:])
    return cache


def _mxfp4_codes(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Any bytes, and every eighth group of 32 codes is zeros of both signs."""
    codes = torch.randint(0, 256, shape, generator=maker.generator)
    groups = codes.view(-1, 16)
    groups[7::8] &= 0x88
    return codes


def _mxfp4_weight_scales(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """2^-9 .. 2^-4, so that products of some thousand columns stay near one."""
    return torch.randint(118, 124, shape, generator=maker.generator)


def _mxfp4_row_tops(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """One above the largest of `_mxfp4_weight_scales`, and 255 (no common exponent) in the first expert's first row."""
    tops = torch.full(shape, 124)
    tops[:1, :1] = 255
    return tops


def _mxfp4_block_scales(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Bytes 0 .. 254; a block of 128 x 128 spreads over 0 .. 20 exponents: some fit one FP8 scale, some do not."""
    scales = torch.empty(shape, dtype=torch.int64)
    for expert in scales:
        for block in (b for rows in expert.split(128, 0) for b in rows.split(4, 1)):
            spread = int(torch.randint(0, 21, (), generator=maker.generator))
            edge = int(torch.randint(0, 3, (), generator=maker.generator))
            lowest = (0, 254 - spread, int(torch.randint(0, 255 - spread, (), generator=maker.generator)))[edge]
            block.copy_(torch.randint(lowest, lowest + spread + 1, block.shape, generator=maker.generator))
    return scales


def _fp8_bits(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Every e4m3fn byte but the two NaNs; subnormals and both zeros among them."""
    bits = torch.randint(0, 254, shape, generator=maker.generator)
    return bits + (bits >= 0x7F)


def _fp8_block_scales(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """No powers of two, and small enough that products of some thousand columns stay near one."""
    return 2e-4 + 3e-4 * torch.rand(shape, generator=maker.generator)


def _fp8_index_keys(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Of each block keys of any e4m3fn bits but NaN, then their scales; bytes nobody wrote are 0xFF, NaN as either."""
    pool, pools = maker.sizes["P"], maker.sizes["block_size"] // maker.sizes["P"]
    split = pools * maker.sizes["D"]
    cache = torch.full(shape, 0xFF, dtype=torch.uint8)
    keys, scales = cache[:, :split].unflatten(1, (pools, -1)), cache[:, split:].unflatten(1, (pools, 4))
    for b, end in enumerate(maker.ends):
        index = torch.arange(max(end, 0) // pool)
        block, slot = maker.block_table[b].long()[index // pools], index % pools
        keys[block, slot] = _fp8_bits(maker, spec, (len(index), maker.sizes["D"])).to(torch.uint8)
        scales[block, slot] = _fp8_block_scales(maker, spec, (len(index), 1)).view(torch.uint8)
    return cache


def _fp8_latent_cache(maker: _Maker, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Rows of e4m3fn codes, float32 scales of 128 each, bfloat16 behind; bytes nobody wrote are NaN as any of them."""
    width, whole = maker.sizes["V"], maker.sizes["R"]
    cache = torch.full(shape, 0xFF, dtype=torch.uint8)
    for b, end in enumerate(maker.ends):
        latents = maker.normal((max(end, 0), whole))
        groups = latents[:, :width].unflatten(1, (-1, 128))
        scales = groups.abs().amax(2, keepdim=True) / 448
        parts = (groups / scales).to(torch.float8_e4m3fn).flatten(1), scales.flatten(1), latents[:, width:].bfloat16()
        rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        cache[maker.slots(b, torch.arange(len(latents)))] = rows
    return cache


_FILLS: Mapping[Fill, Callable[[_Maker, TensorSpec, tuple[int, ...]], Tensor]] = {
    Fill.NORMAL: lambda maker, spec, shape: maker.normal(shape),
    Fill.WEIGHT: lambda maker, spec, shape: maker.normal(shape) * shape[-1] ** -0.5,
    Fill.LOG_GATE: _log_gate,
    Fill.RATE: _rate,
    Fill.CU_SEQLENS: _cu_seqlens,
    Fill.START_POSITIONS: lambda maker, spec, shape: torch.tensor(maker.case.start_positions, dtype=torch.int32),
    Fill.SEQ_LENS: lambda maker, spec, shape: torch.tensor(maker.ends, dtype=torch.int32),
    Fill.BLOCK_TABLE: lambda maker, spec, shape: maker.block_table.clone(),
    Fill.STATE_SLOTS: lambda maker, spec, shape: maker.state_slots.clone(),
    Fill.SLOT_MAPPING: _slot_mapping,
    Fill.TOPK_INDICES: _topk_indices,
    Fill.EXPERT_OFFSETS: _expert_offsets,
    Fill.EXPERT_IDS: _expert_ids,
    Fill.ROW_PLACES: _row_places,
    Fill.ROW_CACHE: lambda maker, spec, shape: torch.full(shape, torch.nan),
    Fill.LATENT_CACHE: _latent_cache,
    Fill.POOL_CACHE: _pool_cache,
    Fill.POOL_TAIL: _pool_tail,
    Fill.STATE_CACHE: _state_cache,
    Fill.MXFP4_CODES: _mxfp4_codes,
    Fill.MXFP4_WEIGHT_SCALES: _mxfp4_weight_scales,
    Fill.MXFP4_BLOCK_SCALES: _mxfp4_block_scales,
    Fill.MXFP4_ROW_TOPS: _mxfp4_row_tops,
    Fill.FP8_BITS: _fp8_bits,
    Fill.FP8_BLOCK_SCALES: _fp8_block_scales,
    Fill.FP8_INDEX_KEYS: _fp8_index_keys,
    Fill.FP8_LATENT_CACHE: _fp8_latent_cache,
    Fill.UNWRITTEN_BYTES: lambda maker, spec, shape: torch.full(shape, 0xAA),
}


def make_inputs(
    operator: Operator,
    case: Case,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Arguments for `case` of `operator`; the same seed gives the same values on every device.

    Rows of caches that the call must not touch are NaN. An even seed hands out the lowest block and state slot first,
    an odd seed the highest, so that a case with one sequence meets both edges over two seeds.
    """
    maker = _Maker(case, seed)
    tensors = {}
    for spec in operator.tensors:
        made = maker.make(spec)
        wanted: torch.dtype = dtype if spec.dtype == FLOAT else getattr(torch, spec.dtype)
        tensors[spec.name] = made.to(device=device, dtype=wanted)
    return Inputs(tensors, dict(case.scalars))
