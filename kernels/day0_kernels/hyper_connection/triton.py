"""Hyper-connection mixing on an NVIDIA GPU; the device code is in `_triton_kernels`, the block sizes in `sm_*.json`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

STREAMS = (2, 4)
# One configuration for every length: another order of summation would give a token other bits beside other tokens.
_PLAIN_MIX = {"BLOCK_T": 16, "BLOCK_K": 64, "DEPTH": 512, "num_warps": 4, "num_stages": 2}
_PLAIN_COLUMNS = {"BLOCK_D": 1024, "num_warps": 4}
# One thread a matrix entry: tokens whose Sinkhorn rounds one program runs.
_MATRIX_TOKENS = 8


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    count = sizes.get("M")
    if count is not None and count not in STREAMS:
        return f"M must be 2 or 4, is {count}"
    return device_refusal(device)


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float, sinkhorn_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; two launches, between which the streams of a short call stay in L2.

    ValueError for a number of streams that is neither 2 nor 4.
    """
    from day0_kernels.hyper_connection._triton_kernels import collapse_kernel, mix_kernel

    tokens, count, width = streams.shape
    if count not in STREAMS:
        raise ValueError(f"M must be 2 or 4, is {count}")
    post = streams.new_empty(tokens, count, dtype=torch.float32)
    comb = streams.new_empty(tokens, count, count, dtype=torch.float32)
    collapsed = streams.new_empty(tokens, width)
    if tokens == 0:
        return post, comb, collapsed
    streams, fn, base, scale = (x.contiguous() for x in (streams, fn.float(), base.float(), scale.float()))
    depth, outputs = count * width, (2 + count) * count
    committed = configuration(__file__, streams.device, "mix", tokens, _PLAIN_MIX)
    chosen = committed if streams.dtype == torch.bfloat16 else _PLAIN_MIX
    parts = -(-depth // chosen["DEPTH"])
    sums = streams.new_empty(parts, tokens, outputs, dtype=torch.float32)
    squares = streams.new_empty(parts, tokens, dtype=torch.float32)
    mix_kernel[(-(-tokens // chosen["BLOCK_T"]), parts)](
        streams,
        fn,
        sums,
        squares,
        tokens,
        K=depth,
        R=outputs,
        R_PAD=_power_of_two(outputs, 16),
        **chosen,
    )
    columns = configuration(__file__, streams.device, "collapse", tokens, _PLAIN_COLUMNS)
    programs = -(-tokens // _MATRIX_TOKENS) + tokens * -(-width // columns["BLOCK_D"])
    collapse_kernel[(programs,)](
        streams,
        sums,
        squares,
        base,
        scale,
        post,
        comb,
        collapsed,
        tokens,
        D=width,
        M=count,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        ROUNDS=sinkhorn_iters,
        PARTS=parts,
        PARTS_PAD=_power_of_two(parts),
        R_PAD=count,
        BLOCK_T=_MATRIX_TOKENS,
        **columns,
    )
    return post, comb, collapsed


def hc_post(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As the reference; every byte is read and written once. ValueError where M is neither 2 nor 4."""
    from day0_kernels.hyper_connection._triton_kernels import mixed_kernel

    tokens, count, width = streams.shape
    if count not in STREAMS:
        raise ValueError(f"M must be 2 or 4, is {count}")
    mixed = streams.new_empty(tokens, count, width)
    if tokens == 0:
        return mixed
    streams, out, post, comb = (x.contiguous() for x in (streams, out, post.float(), comb.float()))
    columns = configuration(__file__, streams.device, "mixed", tokens, _PLAIN_COLUMNS)
    mixed_kernel[(tokens, -(-width // columns["BLOCK_D"]))](
        streams, out, post, comb, mixed, D=width, M=count, **columns
    )
    return mixed


def _power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two from `count` and `least` on."""
    return max(least, 1 << (count - 1).bit_length())
