"""Attention over the residual bank on an NVIDIA GPU; device code is in `_triton_kernels`, sizes in `sm_*.json`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

LARGEST_WIDTH = 8192
MOST_QUERIES = 3
# By width and queries alone: with another order of summation a token would have other bits beside other tokens.
_PLAIN = {"STAGES": 1, "num_warps": 16}


def _limit(sources: int, queries: int, width: int) -> str | None:
    if sources < 1:
        return f"N must be at least 1, is {sources}"
    if not 1 <= queries <= MOST_QUERIES:
        return f"Q must be 1 to {MOST_QUERIES}, is {queries}"
    if width > LARGEST_WIDTH:
        return f"D must be at most {LARGEST_WIDTH}, is {width}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why this kernel cannot serve, or None."""
    return _limit(sizes.get("N", 1), sizes.get("Q", 1), sizes.get("D", 1)) or device_refusal(device)


def attention_residual(
    sources: Tensor, query: Tensor, *, logit_scale: float, norm_eps: float, normed_values: bool
) -> Tensor:
    """As the reference; sources may be any view whose columns are consecutive, such as a bank `[N, T, D]` transposed.

    ValueError where a size is beyond the kernel.
    """
    from day0_kernels.attention_residual._triton_kernels import residual_kernel

    tokens, count, width = sources.shape
    beyond = _limit(count, len(query), width)
    if beyond is not None:
        raise ValueError(beyond)
    out = torch.empty(tokens, len(query), width, dtype=sources.dtype, device=sources.device)
    if tokens == 0:
        return out
    if width > 1 and sources.stride(2) != 1:
        sources = sources.contiguous()
    chosen = configuration(__file__, sources.device, "residual" if len(query) == 1 else "queries", width, _PLAIN)
    residual_kernel[(tokens,)](
        sources,
        query.float().contiguous(),
        out,
        count,
        sources.stride(0),
        sources.stride(1),
        logit_scale,
        norm_eps,
        D=width,
        Q=len(query),
        NORMED=normed_values,
        BLOCK_D=1 << (width - 1).bit_length(),
        **chosen,
    )
    return out
