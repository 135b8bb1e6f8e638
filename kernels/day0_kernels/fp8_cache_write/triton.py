"""The quantising cache writes on an NVIDIA GPU; device code is in `_triton_kernels`, block sizes in `sm_*.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

GROUP = 128
LARGEST_VALUE_DIM = 512
LARGEST_TAIL = 64
LARGEST_KEY = 256
_PLAIN = {"BLOCK_T": 2, "BLOCK_KEYS": 8, "num_warps": 4}
_NO_LATENTS = {"V": 0, "R": 0, "GROUPS": 1, "GROUPS_PAD": 1, "TAIL_PAD": 1}
_NO_KEYS = {"D": 0, "D_PAD": 1, "ROWS": 1}


def _latent_limit(width: int, value_dim: int) -> str | None:
    if value_dim % GROUP or not 0 < value_dim <= LARGEST_VALUE_DIM:
        return f"value_dim must be a multiple of {GROUP} up to {LARGEST_VALUE_DIM}, is {value_dim}"
    if width % 2 or not 0 <= width - value_dim <= LARGEST_TAIL:
        return f"R must be even, value_dim to value_dim + {LARGEST_TAIL}, is {width} with value_dim {value_dim}"
    return None


def _key_limit(width: int) -> str | None:
    if width % 4 or not 0 < width <= LARGEST_KEY:
        return f"D must be a multiple of 4 up to {LARGEST_KEY}, so that scales are aligned, is {width}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    value_dim = sizes.get("V", GROUP)
    limit = _latent_limit(sizes.get("R", value_dim), value_dim) or _key_limit(sizes.get("D", 4))
    return limit or device_refusal(device)


def latent_store_fp8(latents: Tensor, latent_cache: Tensor, slot_mapping: Tensor, *, value_dim: int) -> None:
    """As the reference. ValueError where a size is beyond the kernel or the cache has gaps."""
    _store((latents, latent_cache, slot_mapping), None, value_dim)


def index_key_store_fp8(keys: Tensor, key_cache: Tensor, key_slots: Tensor) -> None:
    """As the reference. ValueError where a size is beyond the kernel or the cache has gaps."""
    _store(None, (keys, key_cache, key_slots), 0)


def latent_and_key_store_fp8(
    latents: Tensor,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    key_cache: Tensor,
    key_slots: Tensor,
    *,
    value_dim: int,
) -> None:
    """As the reference, in one launch. ValueError where a size is beyond the kernel or a cache has gaps."""
    if len(latents) != len(keys):
        raise ValueError(f"keys must be as many as latents, are {len(keys)} beside {len(latents)}")
    _store((latents, latent_cache, slot_mapping), (keys, key_cache, key_slots), value_dim)


def _check(name: str, cache: Tensor, width: int, unit: int) -> None:
    if cache.dtype != torch.uint8 or not cache.is_contiguous() or cache.shape[1] % unit or cache.shape[1] < unit:
        raise ValueError(
            f"{name} must be contiguous uint8 with {unit} bytes a row for {width} columns, is {cache.dtype} "
            f"{tuple(cache.shape)} with strides {cache.stride()}"
        )


def _store(
    latent: tuple[Tensor, Tensor, Tensor] | None, key: tuple[Tensor, Tensor, Tensor] | None, value_dim: int
) -> None:
    from day0_kernels.fp8_cache_write._triton_kernels import store_kernel

    latents, codes, scales, tails, slots = (None,) * 5
    keys, key_codes, key_scales, key_slots = (None,) * 4
    constants: dict[str, Any] = dict(_NO_LATENTS | _NO_KEYS)
    tokens, device = 0, torch.device("cpu")
    if latent is not None:
        latents, codes, slots = latent[0].contiguous(), latent[1], latent[2].contiguous()
        tokens, device, width = len(latents), latents.device, latents.shape[1]
        beyond = _latent_limit(width, value_dim)
        if beyond is not None:
            raise ValueError(beyond)
        groups, tail = value_dim // GROUP, width - value_dim
        row = value_dim + 4 * groups + 2 * tail
        _check("latent_cache", codes, width, row)
        if codes.shape[1] != row:
            raise ValueError(f"latent_cache must have {row} bytes a row, has {codes.shape[1]}")
        scales, tails = codes.view(torch.float32), codes.view(torch.bfloat16)
        constants |= {"V": value_dim, "R": width, "GROUPS": groups, "GROUPS_PAD": _power_of_two(groups)}
        constants["TAIL_PAD"] = _power_of_two(max(tail, 1))
    if key is not None:
        keys, key_codes, key_slots = key[0].contiguous(), key[1], key[2].contiguous()
        tokens, device, width = len(keys), keys.device, keys.shape[1]
        beyond = _key_limit(width)
        if beyond is not None:
            raise ValueError(beyond)
        _check("key_cache", key_codes, width, width + 4)
        key_scales = key_codes.view(torch.float32)
        constants |= {"D": width, "D_PAD": _power_of_two(width), "ROWS": key_codes.shape[1] // (width + 4)}
    if tokens == 0:
        return
    chosen = configuration(__file__, device, "store", tokens, _PLAIN)
    latent_programs = -(-tokens // chosen["BLOCK_T"]) if latent is not None else 0
    key_programs = -(-tokens // chosen["BLOCK_KEYS"]) if key is not None else 0
    store_kernel[(latent_programs + key_programs,)](
        latents,
        codes,
        scales,
        tails,
        slots,
        keys,
        key_codes,
        key_scales,
        key_slots,
        tokens,
        latent_programs,
        **constants,
        **chosen,
    )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
