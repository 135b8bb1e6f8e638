"""Definition of hyper-connection mixing in plain torch; it does not know which sub-layer it wraps."""

from __future__ import annotations

import torch
from torch import Tensor

from day0_kernels.row_invariant import linear, sigmoid, softmax
from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float, sinkhorn_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing weights and the collapsed input of a sub-layer: `(post [T, M], comb [T, M, M], collapsed [T, D])`.

    `streams [T, M, D]`, `fn [(2 + M) M, M D]`, `base [(2 + M) M]`, `scale [3]`; post and comb are float32, collapsed
    has the dtype of streams. Formula: `Glm5NextTextHyperConnection.forward` (Sinkhorn-Knopp makes comb nearly doubly
    stochastic).
    """
    tokens, count, _ = streams.shape
    flat = streams.flatten(1).float()
    flat = flat * torch.rsqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)
    mixed = linear(flat, fn.float())
    base, scale = base.float(), scale.float()
    pre = sigmoid(mixed[:, :count] * scale[0] + base[:count]) + hc_eps
    post = 2 * sigmoid(mixed[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    comb = (mixed[:, 2 * count :] * scale[2] + base[2 * count :]).view(tokens, count, count)
    comb = softmax(comb) + hc_eps
    # A product with ones adds up, broadcasts and adds hc_eps in one call; forty small calls are most of a decode's
    # time.
    ones = comb.new_ones(1, count, count).expand(tokens, -1, -1)
    floor = comb.new_full((1, 1, 1), hc_eps).expand(tokens, count, count)
    comb.div_(torch.baddbmm(floor, ones, comb))
    for _ in range(sinkhorn_iters - 1):
        comb.div_(torch.baddbmm(floor, comb, ones))
        comb.div_(torch.baddbmm(floor, ones, comb))
    collapsed = pre[:, :1] * streams[:, 0].float()
    for i in range(1, count):
        collapsed = collapsed + pre[:, i : i + 1] * streams[:, i].float()
    return post, comb, collapsed.to(streams.dtype)


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
    """`hc_pre`, and the sub-layer's own norm over the collapsed stream: `(post, comb, normed [T, D])`.

    `norm_weight [D]` has the dtype of streams. Formula: `Glm5NextTextRMSNorm.forward`, with its roundings to that dtype
    before the norm, before the weight and after it.
    """
    post, comb, collapsed = hc_pre(
        streams, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters
    )
    wide = collapsed.float()
    unit = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + layer_norm_eps)).to(collapsed.dtype)
    return post, comb, norm_weight * unit


def hc_post(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams `[T, M, D]`: `post [T, M] * out [T, D] + comb [T, M, M]^T @ streams [T, M, D]`, in streams' dtype."""
    count = streams.shape[1]
    wide, weights = streams.float(), comb.float().transpose(1, 2)
    mixed = weights[:, :, :1] * wide[:, :1]
    for i in range(1, count):
        mixed = mixed + weights[:, :, i : i + 1] * wide[:, i : i + 1]
    return (post.float()[..., None] * out.float()[:, None] + mixed).to(streams.dtype)
