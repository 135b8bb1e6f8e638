"""Native glm5_next: upstream's modules with attention, delta state and residual mixing on our operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.glm5_next import modeling_glm5_next as upstream
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from day0_kernels import row_invariant
from llm_svc.adopt.linear_attention import LinearAttention
from llm_svc.adopt.rows import join_weights, per_head, stacked
from llm_svc.cache.storage import IndexedLayerCache, LayerCache, RecurrentLayerCache
from llm_svc.forward_context import ForwardContext, current_context


class Indexer(upstream.Glm5NextTextIndexer):
    """Scores pooled keys through the block table and chooses positions."""

    def forward(
        self,
        q_resid: torch.Tensor,
        keys: torch.Tensor,
        gates: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """q_resid [T, q_lora_rank] -> topk_indices int32 [T, width], -1 pads.

        The attention made `keys` and `gates` [T, head_dim] and `weights` [T, heads] with its own first products.
        """
        context = current_context()
        cache = context.layers[self.layer_idx]
        assert isinstance(cache, IndexedLayerCache) and cache.pool_keys is not None
        q = self.wq_b(q_resid).view(len(q_resid), self.n_heads, self.head_dim)
        weights = weights.float() * self.n_heads**-0.5
        context.operators.index_pool(
            self.k_norm(keys),
            gates,
            self.index_kpool_compress_ape,
            cache.index_tail,
            cache.pool_keys,
            context.state_slots,
            context.block_table,
            context.cu_seqlens,
            context.start_positions,
            block_size=context.block_size,
        )
        options = {
            "pool_size": self.index_kpool,
            "topk_tokens": self.index_topk,
            "block_size": context.block_size,
            "softmax_scale": self.softmax_scale,
            "always_tail": self.index_kpool_always_select_tail,
        }
        split = context.num_decodes
        parts = []
        if split:
            parts.append(
                context.operators.index_select_decode(
                    q[:split],
                    weights[:split],
                    cache.pool_keys,
                    context.decode_block_table,
                    context.decode_seq_lens,
                    **options,
                )
            )
        if context.has_prefill:
            parts.append(
                context.operators.index_select_prefill(
                    q[split:],
                    weights[split:],
                    cache.pool_keys,
                    context.prefill_block_table,
                    context.prefill_cu_seqlens,
                    context.prefill_start_positions,
                    **options,
                )
            )
        return stacked(parts)


class SparseAttention(upstream.Glm5NextTextAttention):
    """Absorbed sparse MLA over latents addressed by blocks; takes packed tokens [1, T, hidden]."""

    def join_products(self) -> None:
        """Makes one product of those that read the layer's input, its indexer's among them; the weights are loaded."""
        joined = [self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight]
        if self.indexer is not None:
            of_gates = self.indexer.index_kpool_compress_gate
            joined += [self.indexer.wk.weight, of_gates, self.indexer.weights_proj.weight]
        self._joined = join_weights(*joined)
        self._joined_sizes = [len(weight) for weight in joined]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        cache: Any = None,
        prev_topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """[1, T, hidden] -> ([1, T, hidden], None, topk_indices for the next layer when it shares them)."""
        context = current_context()
        layer = context.layers[self.layer_idx]
        assert isinstance(layer, IndexedLayerCache)
        tokens = hidden_states.shape[1]
        q_low, latent, *of_indexer = row_invariant.linear(hidden_states[0], self._joined).split(self._joined_sizes, -1)
        if self.config.attention_bias:
            q_low, latent = q_low + self.q_a_proj.bias, latent + self.kv_a_proj_with_mqa.bias
        q_resid = self.q_a_layernorm(q_low)
        q = self.q_b_proj(q_resid).view(tokens, self.num_heads, self.qk_head_dim)
        context.operators.kv_store(self.kv_a_layernorm(latent), layer.latents, context.slot_mapping)
        if self.indexer is not None:
            topk_indices = self.indexer(q_resid, *of_indexer)
        elif prev_topk_indices is not None:
            topk_indices = prev_topk_indices
        else:
            raise ValueError(f"layer {self.layer_idx} shares an earlier layer's choice, and there is none")
        key_up, value_up = self._absorbed()
        q_latent = per_head(q, key_up)
        latent_out = self._attend(context, layer, q_latent, topk_indices)
        out = self.o_proj(per_head(latent_out, value_up).reshape(1, tokens, -1))
        return out, None, topk_indices if self.next_skip_topk else None

    def _absorbed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of kv_b_proj: query to latent [H, nope, kv_lora_rank], latent to value [H, kv_lora_rank, v]."""
        weight = self.kv_b_proj.weight.view(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        key_up, value_up = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        return key_up, value_up.transpose(1, 2)

    def _attend(
        self, context: ForwardContext, layer: IndexedLayerCache, q: torch.Tensor, topk_indices: torch.Tensor
    ) -> torch.Tensor:
        """Attention over the chosen latents, [T, H, kv_lora_rank]."""
        options = {
            "block_size": context.block_size,
            "softmax_scale": self.scaling,
            "value_dim": self.kv_lora_rank,
        }
        split = context.num_decodes
        parts = []
        if split:
            parts.append(
                context.operators.sparse_mla_decode(
                    q[:split], layer.latents, topk_indices[:split], context.decode_block_table, **options
                )
            )
        if context.has_prefill:
            parts.append(
                context.operators.sparse_mla_prefill(
                    q[split:],
                    layer.latents,
                    topk_indices[split:],
                    context.prefill_block_table,
                    context.prefill_cu_seqlens,
                    **options,
                )
            )
        return stacked(parts)


class Gate(upstream.Glm5NextTextTopkRouter):
    """The float32 product of upstream's gate, and its choice by our operator."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., hidden] -> (logits [T, E] float32, weights [T, top_k] float32, ids int32 [T, top_k])."""
        rows = hidden_states.view(-1, self.hidden_dim).float()
        logits = row_invariant.linear(rows, self.weight.float())
        ids, weights = current_context().operators.select_experts(
            logits,
            self.e_score_correction_bias,
            score="sigmoid",
            top_k=self.top_k,
            groups=self.num_group,
            topk_groups=self.topk_group,
            normalise=self.norm_topk_prob,
            scaling=self.routed_scaling_factor,
        )
        return logits, weights, ids


class Norm(upstream.Glm5NextTextRMSNorm):
    """Upstream's norm; on a GPU as torch's one kernel, which rounds once where upstream rounds twice."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        if hidden_states.device.type == "cpu":
            return super().forward(hidden_states)
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class FeedForward(upstream.Glm5NextTextMLP):
    """Upstream's dense or shared expert, its first two products as one and its gate by our operator."""

    def join_products(self) -> None:
        """Makes one product of the two that read the input; the weights are loaded."""
        self._joined = join_weights(self.gate_proj.weight, self.up_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same."""
        gate_up = row_invariant.linear(x, self._joined).flatten(0, -2)
        gated = current_context().operators.swiglu(gate_up, limit=self.swiglu_limit, alpha=1.0, up_offset=0.0)
        out: torch.Tensor = self.down_proj(gated.view(*x.shape[:-1], -1))
        return out


class DecoderLayer(upstream.Glm5NextTextDecoderLayer):
    """Upstream's layer with the residual streams mixed by our operator."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        prev_topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[1, T, streams, hidden] -> (the same, topk_indices for the next layer or None)."""
        post, comb, x = _collapse(hidden_states, self.attn_hc, self.input_layernorm)
        topk_indices = None
        if self.block_type == "linear_attention":
            x = self.self_attn(hidden_states=x)
        else:
            x, _, topk_indices = self.self_attn(hidden_states=x, prev_topk_indices=prev_topk_indices)
        streams = _mix(hidden_states, x, post, comb)
        post, comb, x = _collapse(streams, self.ffn_hc, self.post_attention_layernorm)
        x = self.mlp(x)
        return _mix(streams, x, post, comb), topk_indices


class VisionElsewhere(nn.Module):
    """Stands in the place of the vision tower, which the vision service runs: no weights, no forward."""

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> VisionElsewhere:
        return cls()


ADOPTED: dict[str, type[nn.Module]] = {
    "Glm5NextVisionModel": VisionElsewhere,
    "Glm5NextTextLinearAttention": LinearAttention,
    "Glm5NextTextIndexer": Indexer,
    "Glm5NextTextAttention": SparseAttention,
    "Glm5NextTextTopkRouter": Gate,
    "Glm5NextTextRMSNorm": Norm,
    "Glm5NextTextMLP": FeedForward,
    "Glm5NextTextDecoderLayer": DecoderLayer,
}


def check_config(config: Glm5NextTextConfig, block_size: int) -> None:
    """Raises ValueError for what the operators cannot run, naming the setting or the config field."""
    if block_size % config.index_kpool:
        raise ValueError(f"block_size {block_size} must be a multiple of index_kpool {config.index_kpool}")
    if config.qk_rope_head_dim:
        raise ValueError(f"qk_rope_head_dim {config.qk_rope_head_dim}: glm5_next attention has no rotary part")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act}: the operators of glm5_next compute silu")


def split_model(model: upstream.Glm5NextForConditionalGeneration) -> tuple[nn.Module, nn.Module]:
    """The text model and the output head."""
    return model.model.language_model, model.lm_head


def allocate_layers(
    config: Glm5NextTextConfig,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    num_snapshots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerCache, ...]:
    """Cache tensors of every layer, in order, for a config that `check_config` let pass."""
    pool = config.index_kpool
    heads, dim = config.linear_num_heads, config.linear_head_dim
    tail = config.linear_conv_kernel_dim - 1

    def zeros(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    layers: list[LayerCache] = []
    for layer_type, indexer_type in zip(config.layer_types, config.indexer_types, strict=True):
        if layer_type == "linear_attention":
            layers.append(
                RecurrentLayerCache(
                    conv_state=zeros(num_slots, 3 * heads * dim, tail, of=torch.float32),
                    delta_state=zeros(num_slots, heads, dim, dim, of=torch.float32),
                    saved_conv_state=zeros(num_snapshots, 3 * heads * dim, tail, of=torch.float32),
                    saved_delta_state=zeros(num_snapshots, heads, dim, dim, of=torch.float32),
                )
            )
            continue
        full = indexer_type == "full"
        layers.append(
            IndexedLayerCache(
                latents=zeros(num_blocks * block_size, config.kv_lora_rank),
                pool_keys=zeros(num_blocks * block_size // pool, config.index_head_dim) if full else None,
                index_tail=zeros(num_slots, pool, 2, config.index_head_dim) if full else None,
            )
        )
    return tuple(layers)


def _collapse(
    streams: torch.Tensor, connection: upstream.Glm5NextTextHyperConnection, norm: upstream.Glm5NextTextRMSNorm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[1, T, streams, hidden] -> post [1, T, streams], comb [1, T, streams, streams], the sub-layer's normed input."""
    post, comb, normed = current_context().operators.hc_pre_norm(
        streams[0],
        connection.fn,
        connection.base,
        connection.scale,
        norm.weight,
        norm_eps=connection.input_norm.eps,
        hc_eps=connection.hc_eps,
        sinkhorn_iters=connection.hc_sinkhorn_iters,
        layer_norm_eps=norm.variance_epsilon,
    )
    return post[None], comb[None], normed[None]


def _mix(streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return current_context().operators.hc_post(streams[0], out[0], post[0], comb[0])[None]
