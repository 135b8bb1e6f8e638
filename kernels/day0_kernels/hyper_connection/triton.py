"""Hyper-connection mixing on an NVIDIA GPU; the device code is in `_triton_kernels`, the block sizes in `sm_*.json`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from day0_kernels.spec import Backend
from day0_kernels.triton_launch import PRIORITY, configuration, device_refusal

BACKEND = Backend("triton", PRIORITY, devices=("cuda",), dtypes=("float32", "bfloat16", "float16"))

STREAMS = (2, 4)
LARGEST_WIDTH = 8192
# One choice for every length, and so is the order of summation: with another a token would have other bits beside other
# tokens. For the same reason all committed `pre` have one BLOCK_K.
DEPTH, NUM_WARPS, MATRICES = 512, 8, 32
SPLIT_COLUMNS = 128
# SPLIT: whether a launch in front prepares `fn`. CHAINED: whether a launch may begin while the one in front of it ends.
_PLAIN_PRE = {"SPLIT": 0, "CHAINED": 0, "BLOCK_T": 64, "BLOCK_K": 64, "STAGES": 2}
# Products of float32 run outside the tensor cores.
_EXACT_PRE = {"SPLIT": 0, "CHAINED": 0, "BLOCK_T": 32, "BLOCK_K": 32, "STAGES": 1}
_PLAIN_COLUMNS = {"BLOCK_D": 1024, "num_warps": 4}


def _limit(count: int, width: int) -> str | None:
    if count not in STREAMS:
        return f"M must be 2 or 4, is {count}"
    if width > LARGEST_WIDTH:
        return f"D must be at most {LARGEST_WIDTH}, is {width}"
    return None


def refusal(operator: str, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """Why these kernels cannot serve, or None."""
    return _limit(sizes.get("M", STREAMS[0]), sizes.get("D", 1)) or device_refusal(device)


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float, sinkhorn_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference: the mixing product, then what stands on it. ValueError for M or D beyond the kernels."""
    return _pre(streams, fn, base, scale, None, norm_eps, hc_eps, sinkhorn_iters, 0.0)


def hc_pre_norm(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    layer_norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference. Errors as `hc_pre`."""
    return _pre(streams, fn, base, scale, norm_weight, norm_eps, hc_eps, sinkhorn_iters, layer_norm_eps)


def _pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    layer_norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from day0_kernels.hyper_connection._triton_kernels import finish_kernel, mix_kernel, split_kernel

    tokens, count, width = streams.shape
    beyond = _limit(count, width)
    if beyond is not None:
        raise ValueError(beyond)
    post = streams.new_empty(tokens, count, dtype=torch.float32)
    comb = streams.new_empty(tokens, count, count, dtype=torch.float32)
    out = streams.new_empty(tokens, width)
    if tokens == 0:
        return post, comb, out
    # As models of bfloat16 have it: its values are exact as they are, in one piece.
    whole = streams.dtype == fn.dtype == torch.bfloat16
    fn = fn if whole else fn.float()
    streams, fn, base, scale = (x.contiguous() for x in (streams, fn, base.float(), scale.float()))
    chosen = dict(_EXACT_PRE)
    if streams.dtype == torch.bfloat16:
        chosen = dict(configuration(__file__, streams.device, "pre", tokens, _PLAIN_PRE))
    elif streams.dtype == torch.float16:
        chosen = dict(_PLAIN_PRE)
    chained, split = bool(chosen.pop("CHAINED")), bool(chosen.pop("SPLIT")) and not whole
    depth, parts, row = count * width, -(-count * width // DEPTH), _power_of_two((2 + count) * count + 1, 16)
    sums = streams.new_empty(parts, tokens, row, dtype=torch.float32)
    if split:
        pieces = streams.new_empty(2, row, depth)
        split_kernel[(-(-depth // SPLIT_COLUMNS),)](
            fn, pieces, K=depth, M=count, R_PAD=row, BLOCK_K=SPLIT_COLUMNS, num_warps=4
        )
        fn = pieces
    shared = {"D": width, "M": count, "R_PAD": row, "PARTS": parts, "CHAINED": chained, "num_warps": NUM_WARPS}
    mix_kernel[(-(-tokens // chosen["BLOCK_T"]) * parts,)](
        streams,
        fn,
        sums,
        tokens,
        SPLIT=split,
        DEPTH=DEPTH,
        # The first launch of a call waits for what was before the call.
        launch_pdl=chained and split,
        **shared,
        **chosen,
    )
    finish_kernel[(-(-tokens // MATRICES) + tokens,)](
        streams,
        base,
        scale,
        norm_weight,
        sums,
        torch.empty_like(post),
        post,
        comb,
        out,
        tokens,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        layer_norm_eps=layer_norm_eps,
        NORMED=norm_weight is not None,
        ROUNDS=sinkhorn_iters,
        BLOCK_D=_power_of_two(width),
        MATRICES=MATRICES,
        launch_pdl=chained,
        **shared,
    )
    return post, comb, out


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
