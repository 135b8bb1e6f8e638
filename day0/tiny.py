"""Writes tiny random checkpoints in the full Hugging Face layout; knows nothing of the services that read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    Glm5NextImageProcessorPil,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from day0.tiny_corpus import CORPUS

VOCABULARY_TOKENS = 640
CONTEXT_TOKENS = 4096
SHARD_BYTES = 400_000

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

# The checkpoint family's own format: no line break before a role, one after it.
CHAT_TEMPLATE = """[gMASK]<sop>
{%- macro render(content) -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part is string -%}
{{- part -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- elif part.type == 'image' or part.type == 'image_url' or 'image' in part -%}
{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- else -%}
{{- raise_exception('content part of type ' ~ part.type ~ ' is not text or image') -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant') -%}
{{- raise_exception('role ' ~ message.role ~ ' is not system, user or assistant') -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>\\n' -}}
{{- render(message.content) -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}"""


def write_tiny_checkpoint(path: str | Path, *, seed: int = 0, vocab: int = VOCABULARY_TOKENS) -> Path:
    """Write a random glm5_next checkpoint of about 2 MB and return its folder.

    Every part of the real architecture is there and does something: three delta-attention layers and one sparse
    attention layer, pools, experts, hyper-connections, a vision tower. `index_topk` is 64, so 300 tokens are sparse.
    The same `seed` and `vocab` (tokens, at least 320) give the same bytes. Raises FileExistsError where the folder
    holds something already and ValueError for a vocabulary too small for bytes and special tokens.
    """
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new or an empty folder")
    tokenizer = build_tokenizer(vocab)
    config = build_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Glm5NextForConditionalGeneration(config)
    fill_weights(model, tokenizer, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = build_generation_config(tokenizer)
    with quiet():
        model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)
    shards = sorted(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()))
    assert len(shards) >= 2, f"one shard only: {shards}"
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar of transformers: seven shards take a moment."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def build_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `vocab` tokens, trained on a fixed text; the special tokens take the highest ids."""
    merged = vocab - len(SPECIAL_TOKENS)
    if merged < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab must be at least {256 + 2 * len(SPECIAL_TOKENS)}, got {vocab}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=merged,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS.splitlines(), trainer)
    core.add_special_tokens(list(SPECIAL_TOKENS))
    if core.get_vocab_size() != vocab:
        raise ValueError(f"vocab must be at most {core.get_vocab_size()}, got {vocab}: the training text is too short")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_config(tokenizer: PreTrainedTokenizerFast) -> Glm5NextConfig:
    """The tiny configuration: `K K K D` layers, 32 indexer heads so that no pool scores tie at zero."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "max_position_embeddings": CONTEXT_TOKENS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "full", "full"],
        "index_topk": 64,
        "index_kpool": 4,
        "index_head_dim": 16,
        "index_n_heads": 32,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "hc_mult": 2,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids[token] for token in END_TOKENS],
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "patch_size": 14,
        "image_size": 112,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "projection_intermediate_size": 128,
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
        dtype="float32",
    )


def build_generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Greedy, ending at the family's three end tokens."""
    return GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in END_TOKENS],
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )


def build_image_processor() -> Glm5NextImageProcessorPil:
    """Native-resolution patches of 14 pixels, 4 to 64 visual tokens an image."""
    return Glm5NextImageProcessorPil(min_image_tokens=4, max_image_tokens=64)


@torch.no_grad()
def fill_weights(model: Glm5NextForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Replace upstream's initial values by wider ones, in place, so that no part is dead and logits lie well apart.

    Upstream's 0.02 would leave every logit near zero, the pooling gate constant and the hyper-connections static; a
    wrong result of ours would then look right.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(state.items()):
        leaf = name.rsplit(".", 1)[-1]
        if "inv_freq" in name:
            continue
        if name.endswith("embed_tokens.weight"):
            normal(tensor, 1.0)
        elif name.endswith("lm_head.weight"):
            normal(tensor, 2.0 / math.sqrt(tensor.shape[1]))
        elif leaf == "A_log":
            normal(tensor, 0.3)
        elif leaf == "dt_bias":
            # Decays between about 0.6 and 0.99 a token: memory from a few tokens to a few hundred.
            normal(tensor, 1.0, mean=-3.5)
        elif name.endswith("conv1d.weight"):
            normal(tensor, 0.6)
        elif leaf == "base" or leaf == "e_score_correction_bias":
            normal(tensor, 0.1)
        elif leaf == "scale":
            normal(tensor, 0.1, mean=1.0)
        elif leaf == "index_kpool_compress_ape":
            normal(tensor, 0.5)
        elif leaf == "bias":
            normal(tensor, 0.1)
        elif tensor.ndim == 1:
            normal(tensor, 0.1, mean=1.0)
        elif leaf in ("gate_up_proj", "down_proj"):
            normal(tensor, 1.0 / math.sqrt(tensor.shape[-1]))
        else:
            fan_in = tensor[0].numel()
            gain = 2.0 if "o_proj" in name or "merger.down_proj" in name else 1.0
            normal(tensor, gain / math.sqrt(fan_in))
    # A random model would speak control tokens and lone bytes of split characters; its answers should be text.
    head = model.lm_head.weight
    for token, index in tokenizer.get_vocab().items():
        if token in SPECIAL_TOKENS or not is_whole_text(tokenizer, index):
            head[index] *= 0.25


def is_whole_text(tokenizer: PreTrainedTokenizerFast, index: int) -> bool:
    """Whether the token alone decodes to printable characters or a line break."""
    text = tokenizer.decode([index])
    return bool(text) and "\ufffd" not in text and (text.isprintable() or text == "\n")
