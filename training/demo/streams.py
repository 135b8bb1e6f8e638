"""Hyper-connections of two residual streams for training, with the closed form of Sinkhorn; it knows no layer.

Upstream keeps the streams as `[B, S, 2, hidden]`; here they are two tensors `[B, S, hidden]`, so that mixing them is
elementwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Streams = tuple[Tensor, Tensor]


def connect(
    weights: dict[str, Tensor], streams: Streams, norm_eps: float, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The block's input `[B, S, hidden]` and its mixing weights, of one `Glm5NextTextHyperConnection`.

    A doubly stochastic 2 x 2 matrix is `[[p, 1 - p], [1 - p, p]]`. Sinkhorn's scalings keep the cross ratio of
    `exp(c)`, so `p = sigmoid((c00 - c01 + c11 - c10) / 2)`, to upstream's 20 rounds within 3e-6.
    """
    first, second = streams
    hidden = first.shape[-1]
    fn = weights["fn"]
    logits = (F.linear(first, fn[:, :hidden]) + F.linear(second, fn[:, hidden:])).float()
    squares = (
        torch.linalg.vector_norm(first, dim=-1, keepdim=True, dtype=torch.float32).square()
        + torch.linalg.vector_norm(second, dim=-1, keepdim=True, dtype=torch.float32).square()
    )
    logits = logits * torch.rsqrt(squares / (2 * hidden) + norm_eps)
    base, scale = weights["base"], weights["scale"]
    pre = torch.sigmoid(logits[..., 0:2] * scale[0] + base[0:2]) + eps
    post = 2 * torch.sigmoid(logits[..., 2:4] * scale[1] + base[2:4])
    comb = logits[..., 4:8] * scale[2] + base[4:8]
    keep = torch.sigmoid((comb[..., 0:1] - comb[..., 1:2] - comb[..., 2:3] + comb[..., 3:4]) / 2)
    dtype = first.dtype
    pre_first, pre_second = pre.to(dtype).split(1, -1)
    post_first, post_second = post.to(dtype).split(1, -1)
    return torch.addcmul(pre_first * first, pre_second, second), (post_first, post_second, keep.to(dtype))


def expand(streams: Streams, output: Tensor, mixing: tuple[Tensor, Tensor, Tensor]) -> Streams:
    """The streams after a block: its output added with the post weights to the mixed streams."""
    first, second = streams
    post_first, post_second, keep = mixing
    moved = keep * (first - second)
    return (
        torch.addcmul(second + moved, post_first, output),
        torch.addcmul(first - moved, post_second, output),
    )
