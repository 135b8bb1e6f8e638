"""The upstream tier: the definition's own forward and its own cache, one sequence at a time."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from day0_kernels.workspace import Workspace
from llm_svc.core import Batch, Sequence
from llm_svc.embeddings import batch_embeddings
from llm_svc.expert_residency import ExpertCounts
from llm_svc.model_runner import ModelFacts


class UpstreamRunner:
    """Serves whatever transformers loads, slowly and right; holds the cache of the one running sequence."""

    def __init__(self, model: Any, facts: ModelFacts, device: torch.device) -> None:
        self.facts = facts
        self.workspace: Workspace | None = None
        self.expert_counts = ExpertCounts()
        self.model = model
        self._device = device
        self._cache: Any = None
        self._owner: int | None = None
        parameters = inspect.signature(model.forward).parameters
        # The name changed during transformers 5; a definition from before has the old one.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits float32 [1 or 0, vocab_size] of the only item's last token."""
        assert len(batch.items) == 1, "the upstream tier runs one sequence at a time"
        item = batch.items[0]
        if item.start == 0:
            self._cache, self._owner = None, item.sequence.id
        assert self._owner == item.sequence.id, "another sequence's cache is held"
        out = self.model(
            **self._tokens(batch), **{self._cache_name: self._cache}, **self._options, use_cache=True, return_dict=True
        )
        self._cache = getattr(out, self._cache_name)
        logits: torch.Tensor = out.logits[0, -1:].float()
        return logits if item.samples else logits[:0]

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def forget(self, sequence: Sequence) -> None:
        """Drops the cache when its sequence is over."""
        if self._owner == sequence.id:
            self._cache, self._owner = None, None

    def _tokens(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Ids where there are only those: some definitions use them for more than the embedding."""
        item = batch.items[0]
        end = item.start + item.count
        if any(span.start < end and span.end > item.start for span in item.sequence.prompt.images):
            embeddings = batch_embeddings(self.model.get_input_embeddings(), batch, self._device)
            return {"inputs_embeds": embeddings[None]}
        return {"input_ids": torch.tensor([item.sequence.token_ids(item.start, end)], device=self._device)}
