"""Turns what the engine does into metrics; the engine knows none of their names."""

from __future__ import annotations

import time

from llm_svc.core import FinishReason, Prompt, Sequence
from llm_svc.expert_residency import ExpertCounts
from llm_svc.scheduler import Scheduler
from svc_common.metrics import EngineMetrics


class EngineObserver:
    """Called by the engine's thread at each event; times are on the monotonic clock, in seconds."""

    def __init__(self, metrics: EngineMetrics, experts: ExpertCounts | None = None) -> None:
        self._metrics = metrics
        self._experts = experts or ExpertCounts()
        self._last_token_time: dict[int, float] = {}
        self._reported = [0] * 8

    def arrival(self, prompt: Prompt) -> None:
        """A request was queued."""
        self._metrics.prompt_tokens_total.inc(len(prompt.ids))
        self._metrics.visual_tokens_total.inc(prompt.visual_tokens)

    def scheduled(self, sequence: Sequence) -> None:
        """A sequence is part of a forward; the first time ends its wait in the queue."""
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = time.monotonic()
            waited = sequence.first_scheduled_time - sequence.request.arrival
            self._metrics.request_queue_time_seconds.observe(waited)

    def token(self, sequence: Sequence) -> None:
        """A token was added to a sequence."""
        now = time.monotonic()
        self._metrics.generation_tokens_total.inc()
        if sequence.first_token_time is None:
            sequence.first_token_time = now
            self._metrics.time_to_first_token_seconds.observe(now - sequence.request.arrival)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - self._last_token_time[sequence.id])
        self._last_token_time[sequence.id] = now

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence is over, by an answer or by an abort."""
        last = self._last_token_time.pop(sequence.id, None)
        if reason is FinishReason.ABORT:
            return
        self._metrics.request_success_total.labels(finished_reason=reason.value).inc()
        self._metrics.e2e_request_latency_seconds.observe(time.monotonic() - sequence.request.arrival)
        tokens = len(sequence.output_ids)
        if tokens > 1 and last is not None and sequence.first_token_time is not None:
            self._metrics.time_per_output_token_seconds.observe((last - sequence.first_token_time) / (tokens - 1))

    def non_finite_logits(self) -> None:
        """A row of logits held NaN."""
        self._metrics.nan_logits_total.inc()

    def scheduler(self, scheduler: Scheduler) -> None:
        """The queues and pools as they are now."""
        metrics, blocks, slots, counters = self._metrics, scheduler.blocks, scheduler.slots, scheduler.counters
        metrics.num_requests_waiting.set(len(scheduler.waiting))
        metrics.num_requests_running.set(len(scheduler.running))
        metrics.kv_cache_usage_ratio.set(1 - blocks.free / blocks.num_blocks)
        metrics.state_slots_used.set(slots.num_slots - slots.free)
        experts = self._experts
        totals = [
            counters.prefix_queries_tokens,
            counters.prefix_hits_tokens,
            counters.preemptions,
            experts.hits,
            experts.misses,
            experts.copied_bytes,
            experts.converted,
            experts.kept_mxfp4,
        ]
        series = (
            metrics.prefix_cache_queries_total,
            metrics.prefix_cache_hits_total,
            metrics.num_preemptions_total,
            metrics.expert_slot_hits_total,
            metrics.expert_slot_misses_total,
            metrics.expert_copied_bytes_total,
            metrics.experts_converted_total,
            metrics.experts_kept_mxfp4_total,
        )
        for counter, total, reported in zip(series, totals, self._reported, strict=True):
            counter.inc(total - reported)
        self._reported = totals
