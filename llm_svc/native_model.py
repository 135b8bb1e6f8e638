"""An adopted definition with what it runs on, and one forward of it; knows no batch and no sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from day0_kernels.workspace import Workspace
from llm_svc.adopt.operators import Operators
from llm_svc.adopt.packed_product import PackedProduct
from llm_svc.cache.storage import LayerCache
from llm_svc.forward_context import ForwardContext, forward_context


@dataclass(frozen=True, slots=True)
class NativeModel:
    """An adopted definition and what it runs on.

    `language_model` maps embeddings [1, T, hidden] to hidden states, `lm_head` those to logits; `layer_types` are the
    names under which upstream wants its masks (we mask nothing: the operators know each token's place). `workspace` is
    the arena of all scratch, None where nothing needs any.
    """

    language_model: Any
    lm_head: Any
    layer_types: frozenset[str]
    operators: Operators
    packed_product: PackedProduct
    workspace: Workspace | None
    layers: tuple[LayerCache, ...]
    block_size: int
    delta_chunk_tokens: int
    device: torch.device

    def hidden_states(self, context: ForwardContext, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """embeddings [T, hidden], positions int [T] -> [T, hidden]."""
        with forward_context(context):
            hidden: torch.Tensor = self.language_model(
                inputs_embeds=embeddings[None],
                position_ids=positions[None],
                attention_mask=dict.fromkeys(self.layer_types),
                use_cache=False,
            ).last_hidden_state[0]
        return hidden
