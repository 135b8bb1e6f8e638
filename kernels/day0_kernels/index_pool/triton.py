"""Indexer key pooling on an NVIDIA GPU; the device code is in `_triton_kernels`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

# A program holds a pool of this many values in registers.
LARGEST_POOL_VALUES = 64 * 256
# Which program makes a pool changes none of its bits, so this may differ by anything; it is small beside the rest.
TOKENS, NUM_WARPS = 64, 4


def _limit(pool: int, width: int) -> str | None:
    values = _power_of_two(pool) * _power_of_two(width)
    if values > LARGEST_POOL_VALUES:
        return f"P * D must be at most {LARGEST_POOL_VALUES} as powers of two, is {values}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why this kernel cannot serve, or None."""
    return _limit(sizes.get("P", 1), sizes.get("D", 1)) or device_refusal(device)


def index_pool(
    keys: Tensor,
    gates: Tensor,
    ape: Tensor,
    tail: Tensor,
    pool_cache: Tensor,
    state_slots: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    start_positions: Tensor,
    block_size: int,
) -> None:
    """As the reference, in one launch that reads no length back to the host.

    ValueError for a pool beyond the kernel, or a tail or pool cache with gaps.
    """
    from day0_kernels.index_pool._triton_kernels import pool_kernel

    (tokens, width), pool = keys.shape, len(ape)
    beyond = _limit(pool, width)
    if beyond is not None:
        raise ValueError(beyond)
    for name, cache in (("tail", tail), ("pool_cache", pool_cache)):
        if not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {cache.stride()}")
    if tokens == 0:
        return
    pool_kernel[(tokens // TOKENS + len(state_slots),)](
        keys.contiguous(),
        gates.contiguous(),
        ape.contiguous(),
        tail,
        pool_cache,
        state_slots.contiguous(),
        block_table,
        cu_seqlens,
        start_positions.contiguous(),
        len(state_slots),
        block_table.stride(0),
        D=width,
        D_PAD=_power_of_two(width),
        P=pool,
        P_PAD=_power_of_two(pool),
        BLOCK_SIZE=block_size,
        TOKENS=TOKENS,
        num_warps=NUM_WARPS,
    )


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
