"""The metrics of each service, by the names of the serving conventions; knows how to expose them, not when to count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from svc_common.startup import STAGES, Startup

PREFIX = "day0_"

# Seconds: from a token on a fast card to a long prefill on a CPU.
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One registry of metrics; names are given without the prefix."""

    def __init__(self) -> None:
        # The extra `_created` series would be named like metrics of ours that nobody documented.
        prometheus_client.disable_created_metrics()
        self.registry = CollectorRegistry()

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only rises; `name` ends in `_total`."""
        assert name.endswith("_total"), name
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that rises and falls; `set_function` computes it when it is read."""
        return Gauge(PREFIX + name, help, labels, registry=self.registry)

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = _LONG_SECONDS
    ) -> Histogram:
        """A distribution of seconds; `name` ends in `_seconds`."""
        assert name.endswith("_seconds"), name
        return Histogram(PREFIX + name, help, labels, registry=self.registry, buckets=buckets)

    def start_http(self, host: str, port: int) -> int:
        """Serves /metrics on a thread of its own until `stop_http`; returns the bound port."""
        try:
            self._http, self._http_thread = prometheus_client.start_http_server(port, addr=host, registry=self.registry)
        except OSError as exc:
            raise OSError(f"metrics_port: cannot listen on {host}:{port}: {exc}") from exc
        return int(self._http.server_port)

    def stop_http(self) -> None:
        """Closes the port."""
        self._http.shutdown()
        self._http.server_close()
        self._http_thread.join()

    def text(self) -> str:
        """The exposition text."""
        return prometheus_client.generate_latest(self.registry).decode()


class LoadingMetrics(Metrics):
    """What a service that loads weights shows from its first second; `follow` says of which start."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_load_bytes = self.gauge("weight_load_bytes", "Bytes of weights read so far.")
        self.weight_load_expected_bytes = self.gauge(
            "weight_load_expected_bytes", "Bytes of weights to read in all; 0 until the headers are known."
        )
        self.weight_load_bytes_per_second = self.gauge(
            "weight_load_bytes_per_second", "Rate of the last seconds; 0 outside the load stage."
        )
        self.startup_seconds_left = self.gauge(
            "startup_seconds_left", "Seconds until all weights are read at this rate; NaN while it cannot be told."
        )
        self.startup_seconds_left.set(math.nan)
        self.startup_stage = self.gauge("startup_stage", "1 for the stage the service is in, else 0.", ["stage"])
        for stage in STAGES:
            self.startup_stage.labels(stage=stage)

    def follow(self, startup: Startup) -> None:
        """From now on every scrape reads this start."""

        def seconds_left() -> float:
            progress = startup.snapshot()
            return progress.seconds_left if progress.HasField("seconds_left") else math.nan

        def is_in(stage: str) -> float:
            return float(startup.stage == stage)

        self.weight_load_bytes.set_function(lambda: startup.snapshot().loaded_bytes)
        self.weight_load_expected_bytes.set_function(lambda: startup.snapshot().expected_bytes)
        self.weight_load_bytes_per_second.set_function(lambda: startup.snapshot().bytes_per_second)
        self.startup_seconds_left.set_function(seconds_left)
        for stage in STAGES:
            self.startup_stage.labels(stage=stage).set_function(partial(is_in, stage))


class EngineMetrics(LoadingMetrics):
    """The language service."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_waiting = self.gauge("num_requests_waiting", "Requests that wait to run.")
        self.num_requests_running = self.gauge("num_requests_running", "Requests in the running set.")
        self.kv_cache_usage_ratio = self.gauge("kv_cache_usage_ratio", "Share of cache blocks in use, 0 to 1.")
        self.state_slots_used = self.gauge("state_slots_used", "State slots held by sequences.")
        self.workspace_bytes = self.gauge("workspace_bytes", "Scratch of all operators, allocated at start.")
        self.workspace_high_water_bytes = self.gauge(
            "workspace_high_water_bytes", "Most bytes of the workspace in use at once since the start."
        )
        self.engine_step_age_seconds = self.gauge(
            "engine_step_age_seconds", "Age of the last step while work waits; 0 when idle."
        )
        self.time_to_first_token_seconds = self.histogram(
            "time_to_first_token_seconds", "From arrival to the first token."
        )
        self.inter_token_latency_seconds = self.histogram(
            "inter_token_latency_seconds", "Between consecutive tokens of one answer.", buckets=_SHORT_SECONDS
        )
        self.time_per_output_token_seconds = self.histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first, one value a request.",
            buckets=_SHORT_SECONDS,
        )
        self.e2e_request_latency_seconds = self.histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.request_queue_time_seconds = self.histogram(
            "request_queue_time_seconds", "From arrival to the first step."
        )
        self.prompt_tokens_total = self.counter("prompt_tokens_total", "Prompt tokens, visual tokens included.")
        self.generation_tokens_total = self.counter("generation_tokens_total", "Tokens generated.")
        self.visual_tokens_total = self.counter("visual_tokens_total", "Prompt tokens that came from images.")
        self.prefix_cache_queries_total = self.counter("prefix_cache_queries_total", "Prompt tokens looked up.")
        self.prefix_cache_hits_total = self.counter(
            "prefix_cache_hits_total", "Prompt tokens found in the prefix cache."
        )
        self.num_preemptions_total = self.counter("num_preemptions_total", "Sequences that gave up their blocks.")
        self.expert_slot_hits_total = self.counter(
            "expert_slot_hits_total", "Experts a layer found in its device slots, with experts in host memory."
        )
        self.expert_slot_misses_total = self.counter(
            "expert_slot_misses_total", "Experts that had to be copied into a device slot."
        )
        self.expert_copied_bytes_total = self.counter("expert_copied_bytes_total", "Bytes of those copies.")
        self.experts_converted_total = self.counter(
            "experts_converted_total", "Matrices of experts converted from MXFP4 to FP8."
        )
        self.experts_kept_mxfp4_total = self.counter(
            "experts_kept_mxfp4_total", "Matrices left in MXFP4 because FP8 would have to round them."
        )
        self.request_success_total = self.counter(
            "request_success_total", "Requests that ended with an answer.", ["finished_reason"]
        )
        self.nan_logits_total = self.counter("nan_logits_total", "Requests failed because the model gave NaN.")


class VisionMetrics(LoadingMetrics):
    """The vision service."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_waiting = self.gauge("num_requests_waiting", "Images that wait for a batch.")
        self.num_requests_running = self.gauge("num_requests_running", "Images in the running batch.")
        self.encode_seconds = self.histogram("encode_seconds", "Forward of one batch of images.")
        self.encode_cache_hits_total = self.counter("encode_cache_hits_total", "Images answered from the cache.")
        self.visual_tokens_total = self.counter("visual_tokens_total", "Visual tokens sent.")
        self.e2e_request_latency_seconds = self.histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.request_queue_time_seconds = self.histogram("request_queue_time_seconds", "From arrival to the batch.")
        self.request_success_total = self.counter(
            "request_success_total", "Images that ended with visual tokens.", ["finished_reason"]
        )
        self.request_failure_total = self.counter("request_failure_total", "Images that failed.", ["status"])


class RouterMetrics(Metrics):
    """The router."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_waiting = self.gauge("num_requests_waiting", "Requests admitted, not yet on a replica.")
        self.num_requests_running = self.gauge("num_requests_running", "Requests with an open stream to a replica.")
        self.time_to_first_token_seconds = self.histogram(
            "time_to_first_token_seconds", "From arrival to the first token."
        )
        self.inter_token_latency_seconds = self.histogram(
            "inter_token_latency_seconds", "Between consecutive tokens of one answer.", buckets=_SHORT_SECONDS
        )
        self.e2e_request_latency_seconds = self.histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.request_queue_time_seconds = self.histogram(
            "request_queue_time_seconds", "From arrival to the stream of a replica."
        )
        self.request_success_total = self.counter(
            "request_success_total", "Requests that ended with an answer.", ["finished_reason"]
        )
        self.request_failure_total = self.counter("request_failure_total", "Requests that failed.", ["status"])
        self.request_retries_total = self.counter("request_retries_total", "Requests sent to another replica.")
        self.ready_replicas = self.gauge("ready_replicas", "Replicas that take requests.", ["model"])
