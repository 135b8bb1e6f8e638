"""Decode steps in buckets of fixed size, on a GPU as captured graphs; everything they read has its place for good."""

from __future__ import annotations

import time

import torch

from llm_svc.core import Batch
from llm_svc.decode_buckets import Bucket, Buckets
from llm_svc.decode_rows import DecodeRows
from llm_svc.forward_context import ForwardContext
from llm_svc.native_model import NativeModel
from svc_common.logs import get_logger

_log = get_logger("day0.decode_steps")


class DecodeSteps:
    """Runs batches of decode steps alone, padded to the smallest bucket that holds them.

    After `capture` a bucket is one launch of a CUDA graph; before it, or on a CPU, the same forward is run from Python.
    Rows that only fill a bucket up change no cache, and no expert is read for them.
    """

    def __init__(self, model: NativeModel, buckets: Buckets, vocab_size: int) -> None:
        most_rows, most_blocks = buckets.rows[-1], buckets.blocks[-1]
        self._model = model
        self._buckets = buckets
        self._rows = DecodeRows(most_rows, most_blocks, model.block_size, model.device)
        self._logits = torch.zeros(most_rows, vocab_size, dtype=torch.float32, device=model.device)
        self._bounds = torch.arange(most_rows + 1, dtype=torch.int32, device=model.device)
        self._no_prefill = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def bucket_of(self, batch: Batch) -> Bucket | None:
        """Where `run` puts a batch; None for a batch it does not take: one with a prefill, or beyond every bucket."""
        if not all(item.decodes for item in batch.items):
            return None
        return self._buckets.smallest(len(batch.items), max(len(item.sequence.blocks) for item in batch.items))

    @torch.inference_mode()
    def run(self, batch: Batch, bucket: Bucket) -> torch.Tensor:
        """Logits float32 [number of items, vocab_size], in their order; valid until the next step."""
        self._rows.fill(batch.items, bucket)
        graph = self._graphs.get(bucket)
        if graph is None:
            self._forward(bucket)
        else:
            graph.replay()
        return self._logits[: len(batch.items)]

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every bucket, with rows that stand for no sequence; raises what a capture raises."""
        began = time.perf_counter()
        held = torch.cuda.memory_reserved(self._model.device)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._model.device)
        for bucket in self._buckets:
            self._rows.clear(bucket)
            torch.cuda.synchronize(self._model.device)
            with torch.cuda.stream(stream):
                # Kernels are compiled and libraries make their plans outside the capture.
                self._forward(bucket)
            torch.cuda.synchronize(self._model.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._forward(bucket)
            self._graphs[bucket] = graph
        _log.info(
            "decode steps captured",
            extra={
                "graphs": len(self._graphs),
                "rows": self._buckets.rows,
                "table_blocks": self._buckets.blocks,
                "seconds": round(time.perf_counter() - began, 1),
                "graph_bytes": torch.cuda.memory_reserved(self._model.device) - held,
            },
        )

    def _forward(self, bucket: Bucket) -> None:
        """From the buffers to the logits; what it launches depends on the bucket alone."""
        model, rows = self._model, self._rows
        lengths, slots, state_slots = rows.lengths(bucket), rows.slots(bucket), rows.state_slots(bucket)
        live = lengths > 0
        positions = (lengths - 1).clamp(min=0)
        context = ForwardContext(
            operators=model.operators,
            packed_product=model.packed_product,
            layers=model.layers,
            block_size=model.block_size,
            delta_chunk_tokens=model.delta_chunk_tokens,
            num_decodes=bucket.rows,
            num_tokens=bucket.rows,
            slot_mapping=slots,
            block_table=rows.block_table(bucket),
            cu_seqlens=self._bounds[: bucket.rows + 1],
            start_positions=positions,
            state_slots=state_slots,
            decode_seq_lens=lengths,
            prefill_cu_seqlens=self._no_prefill,
            live=live,
        )
        embeddings = model.language_model.embed_tokens(rows.ids(bucket))
        hidden = model.hidden_states(context, embeddings, positions.long())
        self._logits[: bucket.rows].copy_(model.lm_head(hidden))
