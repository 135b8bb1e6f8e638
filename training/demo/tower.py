"""The vision tower for training, on pictures of one size; it knows no files and no other sizes."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Glm5NextVisionConfig


def patches_of(images: Tensor, patch: int, merge: int, dtype: torch.dtype, noise: float = 0.0) -> Tensor:
    """Patches in ±1, `[N, patches, 3 * patch * patch]`, of uint8 `[N, S, S, 3]`, in the order of upstream's processor.

    `noise` is the deviation of normal pixel noise. Upstream's patches hold each picture twice, for two moments.
    """
    count, side = images.shape[:2]
    grid = side // patch // merge
    pixels = images.to(dtype) / 127.5 - 1.0
    if noise:
        pixels = pixels + noise * torch.randn_like(pixels)
    pixels = pixels.view(count, grid, merge, patch, grid, merge, patch, 3)
    return pixels.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(count, (side // patch) ** 2, 3 * patch * patch)


@lru_cache
def rotation(side: int, merge: int, head_dim: int, theta: float, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine float32 `[patches, head_dim]` of upstream's axial rotary embedding, patches in merge order."""
    grid = side // merge
    index = torch.arange(side * side, device=device).view(grid, merge, grid, merge).transpose(1, 2).flatten()
    spatial = head_dim // 2
    powers = torch.arange(0, spatial, 2, device=device, dtype=torch.float32) / spatial
    rate = 1.0 / (theta**powers)
    angles = torch.cat(((index // side)[:, None] * rate, (index % side)[:, None] * rate), -1)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[N, H, patches, D]` turned by its patch's angles, in float32, in its own dtype again."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def swiglu(weights: dict[str, Tensor], prefix: str, x: Tensor, limit: float) -> Tensor:
    """Upstream's clamped gate, with biases where there are any."""

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    return linear(
        "down_proj", F.silu(linear("gate_proj", x).clamp(max=limit)) * linear("up_proj", x).clamp(-limit, limit)
    )


def encode_images(weights: dict[str, Tensor], config: Glm5NextVisionConfig, images: Tensor, noise: float) -> Tensor:
    """Visual tokens `[N, tokens, out_hidden]` of uint8 `[N, S, S, 3]`, as upstream's `Glm5NextVisionModel` has them."""
    merge, eps, heads = config.spatial_merge_size, config.rms_norm_eps, config.num_heads
    kernel = weights["patch_embed.proj.weight"]
    # The same picture at both moments, so the kernel's two halves may be added beforehand.
    x = patches_of(images, config.patch_size, merge, kernel.dtype, noise)
    x = F.linear(x, kernel.sum(2).flatten(1), weights["patch_embed.proj.bias"])
    count, patches, dim = x.shape
    side = images.shape[1] // config.patch_size
    cos, sin = rotation(side, merge, dim // heads, config.rope_parameters["rope_theta"], str(x.device))
    for layer in range(config.depth):
        block = f"blocks.{layer}."
        h = F.rms_norm(x, (dim,), weights[block + "norm1.weight"], eps)
        qkv = F.linear(h, weights[block + "attn.qkv.weight"], weights[block + "attn.qkv.bias"])
        q, k, v = qkv.view(count, patches, 3, heads, dim // heads).permute(2, 0, 3, 1, 4).unbind(0)
        q = rotate(F.rms_norm(q, q.shape[-1:], weights[block + "attn.q_norm.weight"], eps), cos, sin)
        k = rotate(F.rms_norm(k, k.shape[-1:], weights[block + "attn.k_norm.weight"], eps), cos, sin)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.linear(h, weights[block + "attn.proj.weight"], weights[block + "attn.proj.bias"])
        x = x + swiglu(
            weights, block + "mlp.", F.rms_norm(x, (dim,), weights[block + "norm2.weight"], eps), config.swiglu_limit
        )
    x = F.rms_norm(x, (dim,), weights["post_layernorm.weight"], eps)
    groups = x.view(count, patches // merge**2, merge**2, dim).transpose(-1, -2).flatten(2)
    x = F.linear(groups, weights["downsample.weight"].flatten(1), weights["downsample.bias"])
    x = F.linear(x, weights["merger.proj.weight"])
    norm = weights["merger.post_projection_norm.weight"], weights["merger.post_projection_norm.bias"]
    x = F.gelu(F.layer_norm(x, x.shape[-1:], *norm))
    return swiglu(weights, "merger.", x, config.swiglu_limit)
