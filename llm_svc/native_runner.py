"""The native tier: packed batches through an adopted definition, with block caches and state slots."""

from __future__ import annotations

from typing import Any

import torch

from llm_svc.cache.storage import RecurrentLayerCache
from llm_svc.core import Batch, Sequence
from llm_svc.decode_steps import DecodeSteps
from llm_svc.embeddings import batch_embeddings
from llm_svc.expert_residency import ExpertCounts
from llm_svc.forward_context import ForwardContext
from llm_svc.model_runner import ModelFacts
from llm_svc.native_model import NativeModel


class NativeRunner:
    """Builds the index tensors of a batch, runs one forward, and keeps the recurrent states in step.

    Batches of decode steps alone go to `decode_steps` where there are any.
    """

    def __init__(self, model: NativeModel, facts: ModelFacts, decode_steps: DecodeSteps | None = None) -> None:
        self.facts = facts
        self.workspace = model.workspace
        self.expert_counts: ExpertCounts = model.packed_product.counts
        self.model = model
        self.decode_steps = decode_steps
        self._recurrent = [cache for cache in model.layers if isinstance(cache, RecurrentLayerCache)]

    def prepare(self) -> None:
        """Captures the decode steps on a GPU; raises what goes wrong."""
        if self.decode_steps is not None and self.model.device.type == "cuda":
            self.decode_steps.capture()

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits float32 [number of `batch.sampled`, vocab_size], in their order."""
        self._prepare_states(batch)
        bucket = self.decode_steps.bucket_of(batch) if self.decode_steps is not None else None
        if bucket is not None:
            assert self.decode_steps is not None
            logits = self.decode_steps.run(batch, bucket)
        else:
            logits = self._forward(batch)
        self._save_states(batch)
        return logits

    def _forward(self, batch: Batch) -> torch.Tensor:
        model = self.model
        embeddings = batch_embeddings(model.language_model.embed_tokens, batch, model.device)
        hidden = model.hidden_states(self._context(batch), embeddings, self._positions(batch))
        last_rows = self._last_rows(batch)
        return model.lm_head(hidden[last_rows]).float() if last_rows else hidden.new_empty(0, self.facts.vocab_size)

    def forget(self, sequence: Sequence) -> None:
        """Nothing is held per sequence besides blocks and slots."""

    def _prepare_states(self, batch: Batch) -> None:
        for item in batch.items:
            slot = item.sequence.state_slot
            assert slot is not None
            for cache in self._recurrent:
                if item.restore is not None:
                    cache.restore(slot, item.restore)
                elif item.fresh:
                    cache.clear(slot)

    def _save_states(self, batch: Batch) -> None:
        for item in batch.items:
            if item.save is not None and item.sequence.state_slot is not None:
                for cache in self._recurrent:
                    cache.save(item.sequence.state_slot, item.save)

    def _positions(self, batch: Batch) -> torch.Tensor:
        positions: list[int] = []
        for item in batch.items:
            positions.extend(range(item.start, item.start + item.count))
        return torch.tensor(positions, device=self.model.device)

    def _last_rows(self, batch: Batch) -> list[int]:
        rows, end = [], 0
        for item in batch.items:
            end += item.count
            if item.samples:
                rows.append(end - 1)
        return rows

    def _context(self, batch: Batch) -> ForwardContext:
        model, items, size = self.model, batch.items, self.model.block_size
        num_decodes = sum(item.decodes for item in items)
        assert all(item.decodes for item in items[:num_decodes]), "decode steps come first"
        width = max(len(item.sequence.blocks) for item in items)
        table = [item.sequence.blocks + [-1] * (width - len(item.sequence.blocks)) for item in items]
        slots: list[int] = []
        cu_seqlens = [0]
        for item in items:
            blocks = item.sequence.blocks
            slots.extend(blocks[p // size] * size + p % size for p in range(item.start, item.start + item.count))
            cu_seqlens.append(cu_seqlens[-1] + item.count)

        def int32(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=model.device)

        return ForwardContext(
            operators=model.operators,
            packed_product=model.packed_product,
            layers=model.layers,
            block_size=size,
            delta_chunk_tokens=model.delta_chunk_tokens,
            num_decodes=num_decodes,
            num_tokens=batch.tokens,
            slot_mapping=int32(slots),
            block_table=int32(table),
            cu_seqlens=int32(cu_seqlens),
            start_positions=int32([item.start for item in items]),
            state_slots=int32([item.sequence.state_slot for item in items]),
            decode_seq_lens=int32([item.start + 1 for item in items[:num_decodes]]),
            prefill_cu_seqlens=int32([c - num_decodes for c in cu_seqlens[num_decodes:]]),
        )
