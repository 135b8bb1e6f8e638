"""Native glm5_next: upstream's modules with attention, delta state and residual mixing on our operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.glm5_next import modeling_glm5_next as upstream
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from day0_kernels import row_invariant
from llm_svc.adopt.rows import per_head
from llm_svc.cache.storage import IndexedLayerCache, LayerCache, RecurrentLayerCache
from llm_svc.forward_context import ForwardContext, current_context


class LinearAttention(upstream.Glm5NextTextLinearAttention):
    """KDA with its convolution and delta state in state slots; takes packed tokens [1, T, hidden]."""

    def forward(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        context = current_context()
        state = context.layers[self.layer_idx]
        assert isinstance(state, RecurrentLayerCache)
        x = hidden_states[0]
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        mixed = self._convolve(context, state, qkv).view(x.shape[0], 3, self.num_heads, self.head_dim)
        gate_log = self.forget_gate(hidden_states)[0]
        beta = row_invariant.sigmoid(self.b_proj(x))
        out = self._delta(context, state, mixed, gate_log, beta)
        gate = self.g_b_proj(self.g_a_proj(x)).view_as(out)
        return self.o_proj(self.o_norm(out, gate).reshape(1, x.shape[0], -1))

    def _convolve(self, context: ForwardContext, state: RecurrentLayerCache, qkv: torch.Tensor) -> torch.Tensor:
        """Short convolution over q, k and v at once, [T, 3 * qkv_dim]."""
        weight = self.conv1d.weight.squeeze(1)
        split = context.num_decodes
        parts = []
        if split:
            parts.append(
                context.operators.short_conv_decode(
                    qkv[:split], weight, state.conv_state, context.decode_state_slots, activation=self.activation
                )
            )
        if context.has_prefill:
            parts.append(
                context.operators.short_conv_prefill(
                    qkv[split:],
                    weight,
                    state.conv_state,
                    context.prefill_state_slots,
                    context.prefill_cu_seqlens,
                    activation=self.activation,
                )
            )
        return _join(parts)

    def _delta(
        self,
        context: ForwardContext,
        state: RecurrentLayerCache,
        mixed: torch.Tensor,
        gate_log: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """Gated delta rule, [T, heads, head_dim]: one step for decodes, by chunks for prefills."""
        split = context.num_decodes
        scale = self.head_dim**-0.5
        q, k, v = mixed.transpose(0, 1).contiguous()
        parts = []
        if split:
            parts.append(
                context.operators.gated_delta_decode(
                    q[:split],
                    k[:split],
                    v[:split],
                    gate_log[:split],
                    beta[:split],
                    state.delta_state,
                    context.decode_state_slots,
                    scale=scale,
                )
            )
        if context.has_prefill:
            parts.append(
                context.operators.gated_delta_prefill(
                    q[split:],
                    k[split:],
                    v[split:],
                    gate_log[split:],
                    beta[split:],
                    state.delta_state,
                    context.prefill_state_slots,
                    context.prefill_cu_seqlens,
                    scale=scale,
                    chunk_size=context.delta_chunk_tokens,
                )
            )
        return _join(parts)


class Indexer(upstream.Glm5NextTextIndexer):
    """Scores pooled keys through the block table and chooses positions."""

    def forward(self, hidden_states: torch.Tensor, q_resid: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """hidden_states [T, hidden], q_resid [T, q_lora_rank] -> topk_indices int32 [T, width], -1 pads."""
        context = current_context()
        cache = context.layers[self.layer_idx]
        assert isinstance(cache, IndexedLayerCache) and cache.pool_keys is not None
        tokens = hidden_states.shape[0]
        q = self.wq_b(q_resid).view(tokens, self.n_heads, self.head_dim)
        keys = self.k_norm(self.wk(hidden_states))
        gates = row_invariant.linear(hidden_states, self.index_kpool_compress_gate)
        weights = self.weights_proj(hidden_states).float() * self.n_heads**-0.5
        context.operators.index_pool(
            keys,
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
        return _join(parts)


class SparseAttention(upstream.Glm5NextTextAttention):
    """Absorbed sparse MLA over latents addressed by blocks; takes packed tokens [1, T, hidden]."""

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
        x = hidden_states[0]
        tokens = x.shape[0]
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).view(tokens, self.num_heads, self.qk_head_dim)
        context.operators.kv_store(self.kv_a_layernorm(self.kv_a_proj_with_mqa(x)), layer.latents, context.slot_mapping)
        if self.indexer is not None:
            topk_indices = self.indexer(x, q_resid)
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
        return _join(parts)


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


class HyperConnection(upstream.Glm5NextTextHyperConnection):
    """Mixing weights and the collapsed stream, through our operator."""

    def forward(self, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[1, T, streams, hidden] -> post [1, T, streams], comb [1, T, streams, streams], collapsed [1, T, hidden]."""
        post, comb, collapsed = current_context().operators.hc_pre(
            hidden_streams[0],
            self.fn,
            self.base,
            self.scale,
            norm_eps=self.input_norm.eps,
            hc_eps=self.hc_eps,
            sinkhorn_iters=self.hc_sinkhorn_iters,
        )
        return post[None], comb[None], collapsed[None]


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
        post, comb, x = self.attn_hc(hidden_states)
        x = self.input_layernorm(x)
        topk_indices = None
        if self.block_type == "linear_attention":
            x = self.self_attn(hidden_states=x)
        else:
            x, _, topk_indices = self.self_attn(hidden_states=x, prev_topk_indices=prev_topk_indices)
        streams = _mix(hidden_states, x, post, comb)
        post, comb, x = self.ffn_hc(streams)
        x = self.mlp(self.post_attention_layernorm(x))
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
    "Glm5NextTextHyperConnection": HyperConnection,
    "Glm5NextTextDecoderLayer": DecoderLayer,
}


def check_config(config: Glm5NextTextConfig, block_size: int) -> None:
    """Raises ValueError for what the operators cannot run, naming the setting or the config field."""
    if block_size % config.index_kpool:
        raise ValueError(f"block_size {block_size} must be a multiple of index_kpool {config.index_kpool}")
    if config.qk_rope_head_dim:
        raise ValueError(f"qk_rope_head_dim {config.qk_rope_head_dim}: glm5_next attention has no rotary part")


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


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mix(streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return current_context().operators.hc_post(streams[0], out[0], post[0], comb[0])[None]
