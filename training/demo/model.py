"""The demo model's configuration and first weights, of unmodified upstream classes; it knows no data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    Glm5NextImageProcessorPil,
    PreTrainedTokenizerFast,
)

IMAGE_PIXELS = 112
PATCH_PIXELS = 14
MERGE = 2
VISUAL_TOKENS = (IMAGE_PIXELS // PATCH_PIXELS // MERGE) ** 2
CONTEXT_TOKENS = 16_640
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

# Upstream's `_keep_in_fp32_modules_strict`: it loads these as float32 whatever the dtype asked for.
FLOAT32_NAMES = re.compile(
    r"(^|\.)(e_score_correction_bias|gate\.weight|conv1d|dt_bias|A_log|(attn|ffn)_hc\.(base|scale))($|\.)"
)
RESIDUAL_OUTPUTS = re.compile(
    r"self_attn\.o_proj\.weight|experts\.down_proj|blocks\.\d+\.(attn\.proj|mlp\.down_proj)\.weight"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What may differ between the shipped model and a test's; the defaults are the shipped ones."""

    layers: tuple[str, ...] = ("K", "K", "K", "D", "K", "K", "K", "D")
    hidden: int = 256
    heads: int = 4
    head_dim: int = 64
    lora_rank: int = 128
    delta_head_dim: int = 32
    experts: int = 32
    experts_per_token: int = 4
    expert_inner: int = 128
    index_heads: int = 32
    index_dim: int = 32
    index_topk: int = 256
    index_kpool: int = 4
    vision_layers: int = 4
    vision_hidden: int = 192
    vision_heads: int = 4
    vision_inner: int = 384
    merger_inner: int = 512
    context_tokens: int = CONTEXT_TOKENS


def build_config(tokenizer: PreTrainedTokenizerFast, sizes: Sizes | None = None) -> Glm5NextConfig:
    """A glm5_next configuration of `sizes` (the shipped ones by default) for a tokenizer with the family's tokens."""
    s = sizes or Sizes()
    ids: dict[str, int] = tokenizer.get_vocab()
    layers = len(s.layers)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": s.hidden,
        "intermediate_size": s.expert_inner,
        "moe_intermediate_size": s.expert_inner,
        "num_hidden_layers": layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.heads,
        "n_shared_experts": 0,
        "n_routed_experts": s.experts,
        "num_experts_per_tok": s.experts_per_token,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": s.lora_rank,
        "q_lora_rank": s.lora_rank,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": s.head_dim,
        "v_head_dim": s.head_dim,
        "max_position_embeddings": s.context_tokens,
        "mlp_layer_types": ["sparse"] * layers,
        "layer_types": ["linear_attention" if kind == "K" else "indexed_attention" for kind in s.layers],
        "indexer_types": ["full"] * layers,
        "index_topk": s.index_topk,
        "index_kpool": s.index_kpool,
        "index_head_dim": s.index_dim,
        "index_n_heads": s.index_heads,
        "linear_head_dim": s.delta_head_dim,
        "linear_num_heads": s.heads,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 2,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids[token] for token in END_TOKENS],
    }
    vision: dict[str, Any] = {
        "depth": s.vision_layers,
        "hidden_size": s.vision_hidden,
        "num_heads": s.vision_heads,
        "intermediate_size": s.vision_inner,
        "patch_size": PATCH_PIXELS,
        "image_size": IMAGE_PIXELS,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": s.hidden,
        "projection_intermediate_size": s.merger_inner,
    }
    return Glm5NextConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def build_generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Greedy, ending at the family's three end tokens."""
    return GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in END_TOKENS],
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )


def build_image_processor() -> Glm5NextImageProcessorPil:
    """Upstream's processor set to pixels in ±1 and 16 visual tokens for a square picture of any size."""
    return Glm5NextImageProcessorPil(
        min_image_tokens=VISUAL_TOKENS,
        max_image_tokens=VISUAL_TOKENS,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def keeps_float32(name: str) -> bool:
    """Whether upstream keeps this tensor in float32 beside bfloat16 weights."""
    return FLOAT32_NAMES.search(name) is not None


def build_model(config: Glm5NextConfig, seed: int) -> Glm5NextForConditionalGeneration:
    """Upstream's model in float32 on the CPU with first weights; the same config and seed give the same values.

    Matrices N(0, 1/√fan_in), those that write to a residual also / √(2 · layers), embedding N(0, 0.5), pooling gate 0;
    `A_log`, `dt_bias`, norms and hyper-connections stay as upstream initialises them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Glm5NextForConditionalGeneration(config).float()
        _fill(model, config)
    return model


@torch.no_grad()
def _fill(model: Glm5NextForConditionalGeneration, config: Glm5NextConfig) -> None:
    depth = {"language_model": config.text_config.num_hidden_layers, "visual": config.vision_config.depth}
    for name, tensor in sorted(model.named_parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if tensor.numel() == 0 or "_hc." in name or leaf in ("A_log", "dt_bias"):
            continue
        if leaf in ("bias", "index_kpool_compress_ape", "index_kpool_compress_gate"):
            tensor.zero_()
        elif tensor.ndim == 1:
            tensor.fill_(1.0)
        elif name.endswith("embed_tokens.weight"):
            tensor.normal_(0.0, 0.5)
        else:
            fan_in = tensor.shape[-1] if "experts" in name else tensor[0].numel()
            std = 1.0 / math.sqrt(fan_in)
            if RESIDUAL_OUTPUTS.search(name):
                part = "visual" if ".visual." in name else "language_model"
                std /= math.sqrt(2 * depth[part])
            tensor.normal_(0.0, std)
