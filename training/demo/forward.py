"""The training forward over upstream's parameters, equal to upstream's forward; it knows no optimiser and no data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Glm5NextConfig

from training.demo.delta import delta_layer
from training.demo.experts import moe_layer
from training.demo.sparse import SparseSizes, sparse_layer
from training.demo.streams import connect, expand
from training.demo.tower import encode_images

LANGUAGE = "model.language_model."
VISUAL = "model.visual."
KL_QUERIES = 128


class Embed(torch.autograd.Function):
    """Rows of a table; the gradient is one product with the one-hot ids: no sort, no atomics, no host."""

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return table.index_select(0, ids.flatten()).view(*ids.shape, -1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        one_hot = torch.arange(ctx.rows, device=ids.device)[:, None] == ids.flatten()
        return one_hot.to(grad.dtype) @ grad.flatten(0, 1), None


@dataclass(frozen=True, slots=True)
class Inputs:
    """One batch on the device: ids int32 `[B, L]`, task int8 `[B, L]` (-1: no answer token), images uint8
    `[N, S, S, 3]`, image_slots int32 `[N, tokens]` flat positions (-1: unused)."""

    ids: Tensor
    task: Tensor
    images: Tensor
    image_slots: Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """logits `[B, L, vocabulary]`; kl a float32 scalar, the mean over sparse layers; counts float32 `[layers, E]`."""

    logits: Tensor
    kl: Tensor
    counts: Tensor


def under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights below a module, by their names in it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


class TrainingForward:
    """Upstream's forward in operations that train fast and can be captured; parameters come with every call.

    `weights` are upstream's parameters by their full names, in any dtypes; activations have the embedding's.
    Raises ValueError for a configuration that this form does not cover.
    """

    def __init__(self, config: Glm5NextConfig) -> None:
        text = config.text_config
        if text.hc_mult != 2:
            raise ValueError(f"hc_mult must be 2 for the closed form, got {text.hc_mult}")
        if text.n_shared_experts != 0 or "dense" in text.mlp_layer_types:
            raise ValueError("every feed-forward must be sparse and without shared experts")
        self.config = config
        self.sizes = SparseSizes(
            heads=text.num_attention_heads,
            qk_dim=text.qk_nope_head_dim,
            v_dim=text.v_head_dim,
            index_heads=text.index_n_heads,
            index_dim=text.index_head_dim,
            index_topk=text.index_topk,
            index_kpool=text.index_kpool,
            eps=text.rms_norm_eps,
        )

    def embed(self, weights: dict[str, Tensor], inputs: Inputs, pixel_noise: float) -> Tensor:
        """Token embeddings `[B, L, hidden]` with visual tokens in their slots; unused images go to a spare row."""
        table = weights[LANGUAGE + "embed_tokens.weight"]
        x = Embed.apply(table, inputs.ids)
        if inputs.images.shape[0] == 0:
            return x
        visual = encode_images(under(weights, VISUAL), self.config.vision_config, inputs.images, pixel_noise)
        batch, length, hidden = x.shape
        slots = inputs.image_slots.flatten().to(torch.int64)
        slots = torch.where(slots < 0, batch * length, slots)
        rows = F.pad(x.flatten(0, 1), (0, 0, 0, 1))
        return rows.index_copy(0, slots, visual.flatten(0, 1).to(x.dtype))[:-1].view(batch, length, hidden)

    def __call__(
        self,
        weights: dict[str, Tensor],
        router_bias: Tensor,
        inputs: Inputs,
        *,
        own_topk: bool,
        with_kl: bool = False,
        pixel_noise: float = 0.0,
    ) -> Outputs:
        """Logits of every position. `router_bias` is float32 `[layers, E]`; `own_topk` attends by own choice."""
        text = self.config.text_config
        x = self.embed(weights, inputs, pixel_noise)
        valid = inputs.ids != text.pad_token_id
        positions = kl_positions(inputs.task) if with_kl else None
        streams = (x, x)
        divergences, counts = [], []
        for index in range(text.num_hidden_layers):
            layer = under(weights, f"{LANGUAGE}layers.{index}.")
            x, mixing = connect(under(layer, "attn_hc."), streams, text.rms_norm_eps, text.hc_eps)
            x = F.rms_norm(x, x.shape[-1:], layer["input_layernorm.weight"], text.rms_norm_eps)
            attention = under(layer, "self_attn.")
            if text.layer_types[index] == "linear_attention":
                x = delta_layer(attention, x, text.linear_num_heads, text.linear_lower_bound, text.rms_norm_eps)
            else:
                x, divergence = sparse_layer(attention, x, self.sizes, own_topk, positions)
                if divergence is not None:
                    divergences.append(divergence)
            streams = expand(streams, x, mixing)
            x, mixing = connect(under(layer, "ffn_hc."), streams, text.rms_norm_eps, text.hc_eps)
            x = F.rms_norm(x, x.shape[-1:], layer["post_attention_layernorm.weight"], text.rms_norm_eps)
            x, chosen = moe_layer(
                under(layer, "mlp."),
                router_bias[index],
                x,
                valid,
                text.num_experts_per_tok,
                text.routed_scaling_factor,
                text.swiglu_limit,
            )
            counts.append(chosen)
            streams = expand(streams, x, mixing)
        x = (streams[0] + streams[1]) * 0.5
        x = F.rms_norm(x, x.shape[-1:], weights[LANGUAGE + "norm.weight"], text.rms_norm_eps)
        logits = F.linear(x, weights["lm_head.weight"])
        kl = torch.stack(divergences).mean() if divergences else logits.new_zeros((), dtype=torch.float32)
        return Outputs(logits, kl, torch.stack(counts))


def kl_positions(task: Tensor) -> Tensor:
    """Query positions int64 `[B, Q]` for the indexer's loss: those that predict answer tokens first, others by lot."""
    length = task.shape[1]
    predicts = F.pad(task[:, 1:] >= 0, (0, 1))
    order = torch.rand(task.shape, device=task.device) + predicts
    return order.topk(min(KL_QUERIES, length), -1, sorted=False).indices
