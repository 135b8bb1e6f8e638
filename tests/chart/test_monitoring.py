"""Alerts and autoscalers ask for metrics that services have, of targets that exist; the test question is callable."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
import typer
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from svc_common.metrics import EngineMetrics, Metrics, RouterMetrics, VisionMetrics
from svc_common.startup import STAGES
from tests.chart.rendering import Helm, Manifest, component, container, of_kind, pod_templates

METRICS: dict[str, type[Metrics]] = {"llm": EngineMetrics, "vision": VisionMetrics, "router": RouterMetrics}
ALERTS = {
    "Day0EngineNotStepping": "llm",
    "Day0WeightsFail": "llm vision",
    "Day0QueueGrows": "llm vision router",
    "Day0KvCacheNearlyFull": "llm",
    "Day0EncoderErrors": "vision",
    "Day0ReplicaNotReady": "llm vision",
    "Day0NoReadyReplica": "router",
}
SERIES = re.compile(r"(day0_\w+)\{([^}]*)\}")


def series_of(service: str) -> set[str]:
    """Names that a query may use."""
    families = text_string_to_metric_families(METRICS[service]().text())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def alerts(manifests: list[Manifest]) -> dict[str, Manifest]:
    (rule,) = of_kind(manifests, "PrometheusRule")
    (group,) = rule["spec"]["groups"]
    return {alert["alert"]: alert for alert in group["rules"]}


def queries(manifests: list[Manifest]) -> Iterator[tuple[str, str]]:
    """Every query with the services it must be about."""
    for name, alert in alerts(manifests).items():
        yield ALERTS[name], alert["expr"]
    for scaler in of_kind(manifests, "ScaledObject"):
        yield component(scaler), scaler["spec"]["triggers"][0]["metadata"]["query"]


def test_all_alerts_are_there(helm: Helm) -> None:
    assert set(alerts(helm.template("everything"))) == set(ALERTS)


def test_queries_use_metrics_that_exist_and_reach_their_services(helm: Helm) -> None:
    manifests = helm.template("everything")
    services = {
        one["metadata"]["name"]: component(one)
        for one in of_kind(manifests, "Service")
        if "day0/headless" in one["metadata"]["labels"]
    }
    found = list(queries(manifests))
    assert len(found) == len(ALERTS) + 2
    for about, query in found:
        assert query.count("day0_") == len(SERIES.findall(query))
        for metric, text in SERIES.findall(query):
            matchers = dict(re.findall(r"(\w+)(?:=|=~|!~)\"([^\"]*)\"", text))
            assert matchers["namespace"] == "serving"
            reached = {kind for name, kind in services.items() if re.fullmatch(matchers["service"], name)}
            assert set(about.split()) <= reached, query
            for service in about.split():
                assert metric in series_of(service), (service, metric)
            assert matchers.get("stage", "ready") in STAGES


def test_a_misspelt_metric_would_be_seen() -> None:
    assert "day0_request_failure_total" in series_of("vision")
    assert "day0_encode_errors_total" not in series_of("vision")


def test_braces_of_labels_reach_prometheus(helm: Helm) -> None:
    for alert in alerts(helm.template("gpu")).values():
        assert "{{ $labels.pod }}" in alert["annotations"]["summary"]
        assert alert["labels"]["severity"] in {"warning", "critical"}


def test_monitors_find_one_service_a_component_and_its_port(helm: Helm) -> None:
    manifests = helm.template("everything")
    services = of_kind(manifests, "Service")
    for monitor in of_kind(manifests, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert component(monitor) == component(service)
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_scaled_workloads_exist_and_have_no_count_of_their_own(helm: Helm, mode: str) -> None:
    services = ("router", "vision", "llm")
    modes = ",".join(f"{name}_svc.autoscaling.mode={mode}" for name in services)
    manifests = helm.template("everything", "--set", modes)
    workloads = {
        (one["kind"], one["metadata"]["name"]): one for one in of_kind(manifests, "Deployment", "LeaderWorkerSet")
    }
    scalers = of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    assert sorted(map(component, scalers)) == sorted(services)
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        workload = workloads[target["kind"], target["name"]]
        assert workload["apiVersion"] == target["apiVersion"]
        assert "replicas" not in workload["spec"]
        if mode == "hpa":
            metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
            assert metric in series_of(component(scaler))


def test_question_is_a_command_of_ours_with_a_picture_that_opens(helm: Helm) -> None:
    from day0.cli import app

    for preset, images in (("cpu", 1), ("text-only", 0)):
        manifests = helm.template(preset)
        (pod,) = [template for name, template in pod_templates(manifests) if name == "test"]
        program, *arguments = container(pod)["command"]
        assert program == "day0" and arguments[0] == "chat"
        chat = typer.main.get_command(app).commands["chat"]  # type: ignore[attr-defined]
        # Parses as the command line does; an option that is gone is an error here.
        given = chat.make_context("chat", list(arguments[1:])).params
        assert len(given["image"] or ()) == images
        host, port = given["target"].split(":")
        assert host in {one["metadata"]["name"] for one in of_kind(manifests, "Service")} and port == "50051"
        for first, second in pairwise(arguments):
            if first == "--image":
                head, _, body = second.partition(",")
                assert head == "data:image/png;base64"
                assert Image.open(io.BytesIO(base64.b64decode(body))).size == (112, 112)
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
