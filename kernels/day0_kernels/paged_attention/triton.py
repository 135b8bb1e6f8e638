"""Decode attention over whole paged sequences on an NVIDIA GPU; device code is in `_triton_kernels`.

It does not know how a cache was filled. Products take operands of the dtype of the call and sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

LARGEST_HEADS = 128
LARGEST_VALUE_DIM = 512
LARGEST_TAIL = 64
LARGEST_GROUP = 16
PAIR_DIMS = (64, 128, 256)
# Positions of a run: the same for every call, because a sequence's bits depend on where its runs begin.
RUN_POSITIONS = 1024
_PLAIN_LATENTS = {"BLOCK_H": 16, "BLOCK_W": 32, "STAGES": 2, "num_warps": 4}
_PLAIN_PAIRS = {"BLOCK_W": 32, "STAGES": 2, "num_warps": 4}
# Products of float32 run outside the tensor cores and their tiles are twice as large.
_EXACT_LATENTS = {"BLOCK_H": 16, "BLOCK_W": 16, "STAGES": 1, "num_warps": 8}
_EXACT_PAIRS = {"BLOCK_W": 16, "STAGES": 1, "num_warps": 4}
_JOIN = {"BLOCK_RUNS": 8, "num_warps": 4}


def _latent_limit(heads: int, width: int, value_dim: int) -> str | None:
    if heads > LARGEST_HEADS:
        return f"H must be at most {LARGEST_HEADS}, is {heads}"
    if value_dim > LARGEST_VALUE_DIM:
        return f"value_dim must be at most {LARGEST_VALUE_DIM}, is {value_dim}"
    if not 0 <= width - value_dim <= LARGEST_TAIL:
        return f"R must be value_dim to value_dim + {LARGEST_TAIL}, is {width} with value_dim {value_dim}"
    return None


def _pair_limit(heads: int, key_heads: int, width: int) -> str | None:
    if width not in PAIR_DIMS:
        return f"D must be one of {', '.join(map(str, PAIR_DIMS))}, is {width}"
    if heads % key_heads or heads // key_heads > LARGEST_GROUP:
        return f"H must be 1 to {LARGEST_GROUP} times HKV, is {heads} with HKV {key_heads}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    heads = sizes.get("H", 1)
    if operator == "paged_gqa_decode":
        beyond = _pair_limit(heads, sizes.get("HKV", heads), sizes.get("D", PAIR_DIMS[0]))
    else:
        value_dim = sizes.get("V", sizes.get("R", 1))
        beyond = _latent_limit(heads, sizes.get("R", value_dim), value_dim)
    return beyond or device_refusal(device)


def _power_of_two(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


def _check_cache(name: str, cache: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    if cache.dtype != q.dtype or cache.shape[1:] != shape or not cache.is_contiguous():
        wanted = ", ".join(map(str, ("slots", *shape)))
        raise ValueError(
            f"{name} must be contiguous {q.dtype} [{wanted}], is {cache.dtype} {tuple(cache.shape)} with strides "
            f"{cache.stride()}"
        )


def paged_mla_decode(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    value_dim: int,
) -> Tensor:
    """As the reference; ValueError where a size is beyond the kernels, a dtype differs or the cache has gaps."""
    from day0_kernels.paged_attention._triton_kernels import attend_latents

    rows, heads, width = q.shape
    beyond = _latent_limit(heads, width, value_dim)
    if beyond is not None:
        raise ValueError(beyond)
    _check_cache("latents", latents, q, (width,))
    chosen = dict(_EXACT_LATENTS)
    if q.dtype != torch.float32:
        chosen = dict(configuration(__file__, q.device, "attend_latents", heads, _PLAIN_LATENTS))

    def attend(runs: int, parts: Tensor, peaks: Tensor, totals: Tensor) -> None:
        attend_latents[(rows * -(-heads // chosen["BLOCK_H"]), runs)](
            q.contiguous(),
            latents,
            block_table,
            seq_lens,
            parts,
            peaks,
            totals,
            block_table.stride(0),
            softmax_scale,
            RUN=RUN_POSITIONS,
            BLOCK_SIZE=block_size,
            H=heads,
            R=width,
            V=value_dim,
            BLOCK_V=_power_of_two(value_dim, 16),
            BLOCK_TAIL=_power_of_two(width - value_dim, 16) if width > value_dim else 0,
            **chosen,
        )

    return _in_runs(attend, q, value_dim, block_table, seq_lens, block_size)


def paged_gqa_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
) -> Tensor:
    """As the reference; ValueError where a size is beyond the kernels, a dtype differs or a cache has gaps."""
    from day0_kernels.paged_attention._triton_kernels import attend_pairs

    rows, heads, width = q.shape
    key_heads = key_cache.shape[1]
    beyond = _pair_limit(heads, key_heads, width)
    if beyond is not None:
        raise ValueError(beyond)
    _check_cache("key_cache", key_cache, q, (key_heads, width))
    _check_cache("value_cache", value_cache, q, (key_heads, width))
    chosen = dict(_EXACT_PAIRS)
    if q.dtype != torch.float32:
        chosen = dict(configuration(__file__, q.device, "attend_pairs", width, _PLAIN_PAIRS))

    def attend(runs: int, parts: Tensor, peaks: Tensor, totals: Tensor) -> None:
        attend_pairs[(rows * key_heads, runs)](
            q.contiguous(),
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            parts,
            peaks,
            totals,
            block_table.stride(0),
            softmax_scale,
            RUN=RUN_POSITIONS,
            BLOCK_SIZE=block_size,
            HKV=key_heads,
            GROUP=heads // key_heads,
            D=width,
            BLOCK_G=16,
            **chosen,
        )

    return _in_runs(attend, q, width, block_table, seq_lens, block_size)


def _in_runs(
    attend: Callable[[int, Tensor, Tensor, Tensor], Any],
    q: Tensor,
    value_dim: int,
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
) -> Tensor:
    """As many runs as the block table has room for, then their join; a launch cannot know how long a sequence is."""
    from day0_kernels.paged_attention._triton_kernels import join_runs

    rows, heads, _ = q.shape
    out = torch.empty(rows, heads, value_dim, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    runs = max(1, -(-block_table.shape[1] * block_size // RUN_POSITIONS))
    parts = torch.empty(rows, runs, heads, value_dim, dtype=torch.float32, device=q.device)
    peaks = torch.empty(rows, runs, heads, dtype=torch.float32, device=q.device)
    totals = torch.empty_like(peaks)
    attend(runs, parts, peaks, totals)
    join_runs[(rows, heads)](
        parts,
        peaks,
        totals,
        seq_lens,
        out,
        runs,
        RUN=RUN_POSITIONS,
        H=heads,
        V=value_dim,
        BLOCK_V=_power_of_two(value_dim, 16),
        **_JOIN,
    )
    return out
