"""Writing new rows to their slots, plain and quantised to FP8, checked bit for bit; it times nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for
from day0_kernels.fp8_cache_write import reference
from day0_kernels.fp8_cache_write import triton as fp8
from day0_kernels.kv_store import triton as plain

VALUE_DIM, WIDTH, ROW_BYTES = 512, 576, 656
KEY_DIM, KEY_BYTES, BLOCK = 128, 132, 64
SLOTS = 1 << 17


def _rows(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, width, device="cuda").bfloat16()


def _slots(tokens: int) -> Tensor:
    return torch.randperm(SLOTS, device="cuda")[:tokens].int()


def _differ(got: Tensor, want: Tensor) -> float:
    """Share of bytes that differ."""
    return float((got.view(torch.uint8) != want.view(torch.uint8)).double().mean())


def store_shape(tokens: int) -> Shape:
    """Latent rows of 576 bfloat16 as they are."""
    size_bytes = tokens * (WIDTH * 4 + 4)
    cache = torch.zeros(SLOTS, WIDTH, dtype=torch.bfloat16, device="cuda")
    sets = [(_rows(tokens, WIDTH), _slots(tokens)) for _ in range(sets_for(size_bytes))]

    def checked() -> Tensor:
        plain.kv_store(sets[0][0], cache, sets[0][1])
        return cache[sets[0][1].long()]

    calls = [partial(plain.kv_store, rows, cache, slots) for rows, slots in sets]
    return Shape(
        "kv_store",
        f"{tokens:,} rows of {WIDTH}",
        calls,
        size_bytes,
        lambda found: _differ(found, sets[0][0]),
        0.0,
        checked=checked,
    )


def fp8_shape(tokens: int) -> Shape:
    """Latent rows of 512 + 64 columns to 656 bytes and index keys of 128 to 132, in one launch."""
    size_bytes = tokens * (WIDTH * 2 + ROW_BYTES + KEY_DIM * 2 + KEY_BYTES + 8)
    latent_cache = torch.zeros(SLOTS, ROW_BYTES, dtype=torch.uint8, device="cuda")
    key_cache = torch.zeros(SLOTS // BLOCK, BLOCK * KEY_BYTES, dtype=torch.uint8, device="cuda")
    sets = [
        (_rows(tokens, WIDTH), _slots(tokens), _rows(tokens, KEY_DIM), _slots(tokens))
        for _ in range(sets_for(size_bytes))
    ]

    def store(rows: Tensor, slots: Tensor, keys: Tensor, key_slots: Tensor) -> None:
        fp8.latent_and_key_store_fp8(rows, latent_cache, slots, keys, key_cache, key_slots, value_dim=VALUE_DIM)

    def checked() -> tuple[Tensor, Tensor]:
        latent_cache.zero_()
        key_cache.zero_()
        store(*sets[0])
        return latent_cache, key_cache

    def error(found: tuple[Tensor, Tensor]) -> float:
        rows, slots, keys, key_slots = sets[0]
        wanted = torch.zeros_like(latent_cache), torch.zeros_like(key_cache)
        reference.latent_and_key_store_fp8(rows, wanted[0], slots, keys, wanted[1], key_slots, value_dim=VALUE_DIM)
        return max(_differ(got, want) for got, want in zip(found, wanted, strict=True))

    return Shape(
        "latent_and_key_store_fp8",
        f"{tokens:,} rows of {VALUE_DIM}+{WIDTH - VALUE_DIM}, keys of {KEY_DIM}",
        [partial(store, *one) for one in sets],
        size_bytes,
        error,
        0.0,
        checked=checked,
    )


def shapes() -> Iterator[Callable[[], Shape]]:
    """A decode batch and a prefill chunk of either."""
    for tokens in (32, 128, 4096):
        yield partial(store_shape, tokens)
        yield partial(fp8_shape, tokens)
