"""The words an operator is described in: tensors, scalars, cases, tolerance, scratch. It runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Role(Enum):
    """What a call does with a tensor: reads it, updates it in place, or returns it."""

    INPUT = "input"
    CACHE = "cache"
    OUTPUT = "output"


class Fill(Enum):
    """How the input maker fills a tensor; every kind that holds ids contains its first and its last legal value."""

    NORMAL = "normal"
    WEIGHT = "weight"
    LOG_GATE = "log_gate"
    RATE = "rate"
    CU_SEQLENS = "cu_seqlens"
    START_POSITIONS = "start_positions"
    SEQ_LENS = "seq_lens"
    BLOCK_TABLE = "block_table"
    STATE_SLOTS = "state_slots"
    SLOT_MAPPING = "slot_mapping"
    TOPK_INDICES = "topk_indices"
    EXPERT_OFFSETS = "expert_offsets"
    EXPERT_IDS = "expert_ids"
    ROW_PLACES = "row_places"
    ROW_CACHE = "row_cache"
    LATENT_CACHE = "latent_cache"
    POOL_CACHE = "pool_cache"
    POOL_TAIL = "pool_tail"
    STATE_CACHE = "state_cache"
    MXFP4_CODES = "mxfp4_codes"
    MXFP4_WEIGHT_SCALES = "mxfp4_weight_scales"
    MXFP4_BLOCK_SCALES = "mxfp4_block_scales"
    MXFP4_ROW_TOPS = "mxfp4_row_tops"
    FP8_BITS = "fp8_bits"
    FP8_BLOCK_SCALES = "fp8_block_scales"
    FP8_INDEX_KEYS = "fp8_index_keys"
    FP8_LATENT_CACHE = "fp8_latent_cache"
    UNWRITTEN_BYTES = "unwritten_bytes"


FLOAT = "float"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a call.

    `shape` holds numbers, dimension names of the case, or integer expressions of them (`"(2 + M) * M"`). `dtype` is a
    torch dtype name, or `"float"` for the dtype the call runs in. `ids` says in words which values an id tensor may
    hold, padding included.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str = FLOAT
    role: Role = Role.INPUT
    fill: Fill = Fill.NORMAL
    ids: str | None = None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest `|got - want| - relative * |want|` a backend may show against the reference, per dtype name."""

    absolute: Mapping[str, float]
    relative: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "absolute", MappingProxyType(dict(self.absolute)))
        object.__setattr__(self, "relative", MappingProxyType(dict(self.relative)))


EXACT = Tolerance(
    {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One shape to run: dimensions, packed sequences, scalar arguments.

    `new_tokens[b]` tokens of sequence b are in the call (all 1 for decode), starting at position
    `start_positions[b]`. `state_slots[b]` and `padded` sequences (state slot -1) are chosen by the input maker.
    `expert_rows[e]` rows go to expert e.
    """

    name: str
    dims: Mapping[str, int]
    new_tokens: tuple[int, ...] = ()
    start_positions: tuple[int, ...] = ()
    scalars: Mapping[str, object] = field(default_factory=dict)
    expert_rows: tuple[int, ...] = ()
    padded_sequences: int = 0

    def __post_init__(self) -> None:
        assert not self.start_positions or len(self.start_positions) == len(self.new_tokens)
        assert 0 <= self.padded_sequences <= len(self.new_tokens)
        object.__setattr__(self, "dims", MappingProxyType(dict(self.dims)))
        object.__setattr__(self, "scalars", MappingProxyType(dict(self.scalars)))

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions by name, with `T` (tokens) and `B` (sequences) counted, or `N` rows where experts own them."""
        sizes = dict(self.dims)
        if self.new_tokens:
            sizes |= {"T": sum(self.new_tokens), "B": len(self.new_tokens)}
        if self.expert_rows:
            sizes |= {"N": sum(self.expert_rows), "E": len(self.expert_rows)}
        return sizes


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """One named piece of workspace a backend needs, its largest shape given by dimension names, and its dtype."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Operator:
    """What one entry function computes.

    `tensors` and then `scalars` are its parameters by name (`scalars` maps a name to its meaning), `outputs` what it
    returns. `formula` is a line of text; the README beside the spec says the same at length. `judged_as_called` names
    float32 results that sum what was rounded to the dtype of the call: they have that dtype's tolerance.
    """

    name: str
    formula: str
    tensors: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scalars: Mapping[str, str]
    cases: tuple[Case, ...]
    tolerance: Tolerance
    judged_as_called: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in (*self.tensors, *self.outputs)] + list(self.scalars)
        assert len(names) == len(set(names)), f"{self.name}: a name is used twice in {names}"
        case_names = [case.name for case in self.cases]
        assert len(case_names) == len(set(case_names)), f"{self.name}: a case name is used twice in {case_names}"
        object.__setattr__(self, "scalars", MappingProxyType(dict(self.scalars)))

    @property
    def cached(self) -> tuple[TensorSpec, ...]:
        """The tensors a call updates in place."""
        return tuple(tensor for tensor in self.tensors if tensor.role is Role.CACHE)


@dataclass(frozen=True, slots=True)
class Backend:
    """What a backend module says about itself, as its attribute `BACKEND`.

    `devices` and `dtypes` are torch device types and dtype names; an empty tuple means any. Of the backends that do not
    refuse, the one of highest `priority` is taken. `scratch` is the workspace each operator of it needs.
    """

    name: str
    priority: int
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    scratch: Mapping[str, tuple[ScratchSpec, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scratch", MappingProxyType(dict(self.scratch)))


def size_of(expression: int | str, sizes: Mapping[str, int]) -> int:
    """Value of a shape entry: a number, a dimension name, or an expression of them in + - * // and parentheses."""
    if isinstance(expression, int):
        return expression
    if expression in sizes:
        return sizes[expression]
    code = compile(expression, "<shape>", "eval")
    unknown = set(code.co_names) - set(sizes)
    if unknown:
        raise KeyError(f"shape {expression!r} names {sorted(unknown)}, known are {sorted(sizes)}")
    return int(eval(code, {"__builtins__": {}}, dict(sizes)))


def shape_of(spec: TensorSpec | ScratchSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Concrete shape of a tensor or scratch for the given dimension sizes."""
    return tuple(size_of(entry, sizes) for entry in spec.shape)
