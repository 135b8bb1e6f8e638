"""Experts of an adopted definition that stay in MXFP4; the products decode them as they go."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.glm5_next import modeling_glm5_next as upstream

from llm_svc.adopt.experts import experts_forward
from llm_svc.expert_memory import ExpertShape
from llm_svc.expert_residency import DeviceExperts, ExpertCounts, HostExperts, ResidentExperts
from llm_svc.formats.mxfp4 import PackedExperts
from llm_svc.forward_context import current_context


class Glm5NextPackedExperts(upstream.Glm5NextTextExperts):
    """Upstream's experts without its float parameters; `packed` is filled from the checkpoint once it is built."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.num_experts = config.num_local_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.swiglu_limit = config.swiglu_limit
        self.packed: PackedExperts | None = None
        self.resident: ResidentExperts | None = None
        # There is nothing to draw at random here, which is what upstream would do next.
        self._is_hf_initialized = True

    def fill(self, packed: PackedExperts) -> None:
        """Takes the weights of this layer; raises ValueError when they are of another model's size."""
        expected = (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim // 2)
        found = tuple(packed.gate_up.codes.shape)
        if found != expected:
            raise ValueError(f"packed gate and up are {list(found)} bytes, the config needs {list(expected)}")
        self.packed = packed
        self.resident = DeviceExperts(packed)

    def keep_in_host_memory(self, slots: int, device: torch.device, counts: ExpertCounts) -> None:
        """Leaves the weights where they are and gives the layer `slots` slots on the device."""
        assert self.packed is not None
        self.resident = HostExperts(self.packed, slots, device, counts)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2 * intermediate] -> [N, intermediate]: upstream's formula in float32, rounded once."""
        out: torch.Tensor = current_context().operators.swiglu(
            gate_up, limit=self.swiglu_limit, alpha=1.0, up_offset=0.0
        )
        return out

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], [T, top_k], [T, top_k] -> [T, hidden]."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


def expert_shape(config: Any) -> ExpertShape:
    """The routed experts of a glm5_next text config."""
    return ExpertShape(
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
    )
