"""Every metric of the serving conventions exists under its name and can be scraped."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from svc_common.metrics import EngineMetrics, Metrics, RouterMetrics, VisionMetrics

LOADING = [
    "weight_load_bytes",
    "weight_load_expected_bytes",
    "weight_load_bytes_per_second",
    "startup_seconds_left",
    "startup_stage",
]
ENGINE = [
    *LOADING,
    "num_requests_waiting",
    "num_requests_running",
    "kv_cache_usage_ratio",
    "state_slots_used",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "prompt_tokens_total",
    "generation_tokens_total",
    "visual_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "expert_slot_hits_total",
    "expert_slot_misses_total",
    "expert_copied_bytes_total",
    "experts_converted_total",
    "experts_kept_mxfp4_total",
    "request_success_total",
    "engine_step_age_seconds",
    "workspace_bytes",
    "workspace_high_water_bytes",
]
VISION = [*LOADING, "encode_seconds", "encode_cache_hits_total", "request_failure_total"]
ROUTER = ["num_requests_running", "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_success_total"]


@pytest.mark.parametrize(
    ("metrics", "names"), [(EngineMetrics, ENGINE), (VisionMetrics, VISION), (RouterMetrics, ROUTER)]
)
def test_conventional_names_are_exposed_and_are_attributes(metrics: type[Metrics], names: list[str]) -> None:
    built = metrics()
    families = {family.name for family in text_string_to_metric_families(built.text())}
    for name in names:
        # The parser, like OpenMetrics, takes `_total` for a suffix of a counter's sample.
        assert f"day0_{name.removesuffix('_total')}" in families
        assert hasattr(built, name)


@pytest.mark.parametrize("metrics", [EngineMetrics, VisionMetrics, RouterMetrics])
def test_every_attribute_is_exposed_under_its_own_name(metrics: type[Metrics]) -> None:
    built = metrics()
    text = built.text()
    for name in vars(built):
        if name != "registry":
            assert f"# HELP day0_{name} " in text, name
    assert "_created" not in text


def test_labels_are_as_the_conventions_say() -> None:
    metrics = EngineMetrics()
    metrics.request_success_total.labels(finished_reason="stop").inc()
    assert 'day0_request_success_total{finished_reason="stop"} 1.0' in metrics.text()


def test_two_services_in_one_process_do_not_share_counts() -> None:
    first, second = EngineMetrics(), EngineMetrics()
    first.prompt_tokens_total.inc(5)
    assert "day0_prompt_tokens_total 5.0" in first.text()
    assert "day0_prompt_tokens_total 0.0" in second.text()


def test_scrape_over_http() -> None:
    metrics = RouterMetrics()
    metrics.request_failure_total.labels(status="UNAVAILABLE").inc()
    port = metrics.start_http("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'day0_request_failure_total{status="UNAVAILABLE"} 1.0' in answer.read().decode()
    metrics.stop_http()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_taken_port_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="metrics_port: cannot listen"):
            RouterMetrics().start_http("127.0.0.1", taken.getsockname()[1])
