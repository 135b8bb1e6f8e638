"""The KV store on an NVIDIA GPU; the device code is in `_triton_kernels`, the block sizes in `sm_*.json`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

_PLAIN = {"BLOCK_T": 4, "num_warps": 4}


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    return device_refusal(device)


def kv_store(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """As the reference, in one launch that needs to know no slot beforehand. ValueError for a cache with gaps."""
    from day0_kernels.kv_store._triton_kernels import store_kernel

    tokens, width = rows.shape
    if not cache.is_contiguous():
        raise ValueError(f"cache must be contiguous, its strides are {cache.stride()}")
    if tokens == 0:
        return
    chosen = configuration(__file__, rows.device, "store", tokens, _PLAIN)
    store_kernel[(-(-tokens // chosen["BLOCK_T"]),)](
        rows.contiguous(),
        cache,
        slot_mapping.contiguous(),
        tokens,
        D=width,
        D_PAD=1 << (width - 1).bit_length(),
        SAME=rows.dtype == cache.dtype,
        **chosen,
    )
