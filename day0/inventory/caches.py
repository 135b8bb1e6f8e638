"""Bytes that caches take a token and a sequence, upstream's as a forward left them and ours as they are allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llm_svc.adopt.families import Family
from llm_svc.cache.storage import layer_bytes


@dataclass(frozen=True, slots=True)
class CacheRow:
    """Layers whose caches are alike. `bound_tokens` is the most tokens of a sequence that they hold, None: all.

    `token_bytes` and `sequence_bytes` are of all `layers` together; the second does not grow with the sequence.
    `tensors` gives name, dtype and shape as they were after a prompt.
    """

    kind: str
    layers: int
    tensors: tuple[str, ...]
    token_bytes: float
    sequence_bytes: float
    bound_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class NativeCache:
    """What the native tier allocates: bytes of a token in a block, of a state slot, and of a snapshot."""

    token_bytes: float
    sequence_bytes: int
    snapshot_bytes: int


def upstream_rows(short: Any, long: Any, tokens: int) -> tuple[CacheRow, ...]:
    """Caches after `tokens` and after twice as many: what differs grows with the sequence.

    Keys and values of a layer with a sliding window are in a row of their own, which grows up to the window.
    """
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for one, other in zip(getattr(short, "layers", ()), getattr(long, "layers", ()), strict=True):
        first, second = dict(_tensors(one)), dict(_tensors(other))
        window = getattr(one, "sliding_window", None)
        bound = int(window) - 1 if isinstance(window, int) and window > 1 else None
        sliding = {name: tensor for name, tensor in first.items() if bound and name in ("keys", "values")}
        rest = {name: tensor for name, tensor in first.items() if name not in sliding}
        if bound and sliding:
            # Past the window a difference would say nothing.
            per_token = _size(sliding) / min(tokens, bound)
            found.setdefault((type(one).__name__, _shapes(sliding), bound), []).append((per_token, 0.0))
        if rest:
            grown = sum(tensor.nbytes for name, tensor in second.items() if name not in sliding)
            per_token = (grown - _size(rest)) / tokens
            held = (per_token, _size(rest) - per_token * tokens)
            found.setdefault((type(one).__name__, _shapes(rest), None), []).append(held)
    return tuple(
        CacheRow(kind, len(sizes), shapes, sum(t for t, _ in sizes), sum(s for _, s in sizes), bound)
        for (kind, shapes, bound), sizes in found.items()
    )


def _shapes(tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    return tuple(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors.items()
    )


def native_cache(family: Family, text_config: Any, dtype: torch.dtype, block_size: int) -> NativeCache:
    """By the difference of two allocations on the meta device, for each of the three things that are counted."""

    def allocated(blocks: int, slots: int, snapshots: int) -> int:
        return layer_bytes(
            family.allocate_layers(
                text_config,
                num_blocks=blocks,
                block_size=block_size,
                num_slots=slots,
                num_snapshots=snapshots,
                dtype=dtype,
                device=torch.device("meta"),
            )
        )

    least = allocated(1, 1, 1)
    return NativeCache(
        (allocated(2, 1, 1) - least) / block_size, allocated(1, 2, 1) - least, allocated(1, 1, 2) - least
    )


def _tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of two dimensions and more that a cache layer holds, by name; one object counts once."""
    seen: set[int] = set()

    def walk(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            if value.dim() >= 2 and id(value) not in seen:
                seen.add(id(value))
                yield name, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{name}.{key}", inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                yield from walk(f"{name}.{index}", inner)

    for name, value in vars(layer).items():
        yield from walk(name, value)


def _size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
