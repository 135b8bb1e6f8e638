"""Linear attention of glm5_next (KDA) on our operators, its convolution and delta state in state slots."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.glm5_next import modeling_glm5_next as upstream

from day0_kernels import row_invariant
from llm_svc.adopt.rows import join_weights, stacked
from llm_svc.cache.storage import RecurrentLayerCache
from llm_svc.forward_context import ForwardContext, current_context


class LinearAttention(upstream.Glm5NextTextLinearAttention):
    """KDA with its convolution and delta state in state slots; takes packed tokens [1, T, hidden]."""

    def join_products(self) -> None:
        """Makes one product of the six that read the layer's input; its weights are loaded."""
        joined = (self.q_proj, self.k_proj, self.v_proj, self.forget_gate.f_a_proj, self.g_a_proj, self.b_proj)
        self._joined = join_weights(*(projection.weight for projection in joined))

    def forward(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        context = current_context()
        state = context.layers[self.layer_idx]
        assert isinstance(state, RecurrentLayerCache)
        x = hidden_states[0]
        qkv, forget, gate, rate = row_invariant.linear(x, self._joined).split(
            [3 * self.qkv_dim, self.head_dim, self.head_dim, self.num_heads], -1
        )
        mixed = self._convolve(context, state, qkv).view(len(x), 3, self.num_heads, self.head_dim)
        forgets = self.forget_gate
        gate_log, beta = context.operators.delta_gates(
            forgets.f_b_proj(forget).view(len(x), self.num_heads, self.head_dim),
            rate,
            forgets.dt_bias,
            forgets.A_log,
            lower_bound=forgets.safe_gate_lower_bound,
        )
        out = self._delta(context, state, mixed, gate_log, beta)
        normed = context.operators.gated_norm(
            out, self.g_b_proj(gate).view_as(out), self.o_norm.weight, norm_eps=self.o_norm.variance_epsilon
        )
        return self.o_proj(normed.view(1, len(x), -1))

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
        return stacked(parts)

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
        q, k, v = mixed.unbind(1)
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
        return stacked(parts)
