"""What the chart refuses, and that each refusal names the place; the schema is closed and fresh."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import CHART, ROOT, Helm, Refused

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# Objects whose keys are the user's or Kubernetes' own.
OPEN = {
    "/properties/global",
    "/definitions/text_map",
    "/definitions/quantities",
    "/definitions/kubernetes_object",
    "/definitions/kubernetes_objects/items",
}


@pytest.mark.parametrize(
    ("values", "place", "says"),
    [
        ("modle: {uri: s3://a}", "at ''", "'modle' not allowed"),
        ("llm_svc: {settings: {cache_tokenz: 1}}", "/llm_svc/settings", "'cache_tokenz' not allowed"),
        ("router_svc: {settings: {cache_tokens: 1}}", "/router_svc/settings", "'cache_tokens' not allowed"),
        ("llm_svc: {settings: {grpc_port: 1}}", "/llm_svc/settings", "'grpc_port' not allowed"),
        ("llm_svc: {settings: {cache_tokens: 1.5}}", "/llm_svc/settings/cache_tokens", "want"),
        ("llm_svc: {settings: {cache_tokens: many}}", "/llm_svc/settings/cache_tokens", "'many' does not match"),
        ("llm_svc: {settings: {cache_tokens: 0}}", "/llm_svc/settings/cache_tokens", "minimum"),
        ("llm_svc: {settings: {cache_tokens: 9007199254740993}}", "/llm_svc/settings/cache_tokens", "maximum"),
        ("llm_svc: {settings: {prefix_cache: 1}}", "/llm_svc/settings/prefix_cache", "got number"),
        ("llm_svc: {settings: {prefix_cache: 'yes'}}", "/llm_svc/settings/prefix_cache", "'yes' does not match"),
        ("llm_svc: {settings: {dtype: float16}}", "/llm_svc/settings/dtype", "float32"),
        ("llm_svc: {settings: {drain_seconds: null}}", "/llm_svc/settings", "missing property 'drain_seconds'"),
        ("vision_svc: {settings: {background: [255, 255]}}", "/vision_svc/settings/background", "minItems"),
        ("vision_svc: {settings: {background: [255, 255, 256]}}", "/vision_svc/settings/background/2", "maximum"),
        (
            "router_svc: {settings: {fetch_allowed_hosts: ['a,b']}}",
            "/router_svc/settings/fetch_allowed_hosts/0",
            "'a,b'",
        ),
        ("images: {tag: 20161216}", "/images/tag", "got number, want string"),
        ("images: {tag: 0123}", "/images/tag", "got number, want string"),
        ("images: {tag: true}", "/images/tag", "got boolean, want string"),
        ("llm_svc: {podAnnotations: {a: true}}", "/llm_svc/podAnnotations/a", "got boolean, want string"),
        ("vision_svc: {enabled: 'false'}", "/vision_svc/enabled", "got string, want boolean"),
        ("router_svc: {replicas: '2'}", "/router_svc/replicas", "got string, want integer"),
        ("router_svc: {service: {type: Loadbalancer}}", "/router_svc/service/type", "LoadBalancer"),
        ("probes: {style: http}", "/probes/style", "'grpc', 'exec'"),
        ("model: {weightBytes: 62 MB}", "/model/weightBytes", "'62 MB' does not match"),
        ("model: {weightBytes: -1}", "/model/weightBytes", "minimum"),
        ("networkPolicy: {clients: [{ipblock: {}}]}", "/networkPolicy/clients/0", "'ipblock' not allowed"),
        ("llm_svc: {extraEnv: [{name: DAY0_LLM_TIER, value: auto}]}", "/llm_svc/extraEnv/0/name", "'not' failed"),
        ("llm_svc: {extraEnv: [{name: AWS_SECRET_ACCESS_KEY, value: abc}]}", "/llm_svc/extraEnv/0", "'valueFrom'"),
        ("llm_svc: {leaderWorkerSet: {enabled: true, size: 1}}", "/llm_svc/leaderWorkerSet/size", "minimum"),
    ],
)
def test_refused_with_its_path(helm: Helm, tmp_path: Path, values: str, place: str, says: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.template("cpu", values=values, tmp_path=tmp_path)
    assert "the specifications of the schema" in str(refused.value)
    lines = [line for line in str(refused.value).splitlines() if f"{place}'" in line or place == "at ''" in line]
    assert lines and says in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("model.uri=", "model.uri: required"),
        ("model.weightBytes=0", "model.weightBytes: required"),
        (
            "llm_svc.terminationGracePeriodSeconds=125",
            "terminationGracePeriodSeconds: 125 must be greater than preStopSeconds + settings.drain_seconds = 125",
        ),
        ("llm_svc.enabled=false", "router_svc.llmTargets: required where llm_svc.enabled is false"),
        ("llm_svc.autoscaling.mode=keda", "keda.prometheusAddress: required where autoscaling.mode is keda"),
        (
            "vision_svc.autoscaling.mode=hpa,vision_svc.autoscaling.minReplicas=5",
            "vision_svc.autoscaling.minReplicas: 5 is greater than maxReplicas 4",
        ),
    ],
)
def test_values_that_do_not_go_together(helm: Helm, arguments: str, says: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.template("cpu", "--set", arguments)
    assert says in str(refused.value)


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place of a schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, inner in schema.items():
            yield from objects(inner, f"{path}/{key}")
    elif isinstance(schema, list):
        for number, inner in enumerate(schema):
            yield from objects(inner, f"{path}/{number}")


def test_every_object_is_closed() -> None:
    found = dict(objects(SCHEMA))
    assert len(found) > 30
    assert {path for path, schema in found.items() if schema.get("additionalProperties") is not False} == OPEN


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rsplit("/", 1)[1]] if reference else schema


def undescribed(schema: dict[str, Any], values: Any, path: str) -> Iterator[str]:
    """Keys of the schema that the values file lacks: nobody would find them."""
    for name, inner in resolved(schema).get("properties", {}).items():
        if name not in values:
            yield f"{path}.{name}"
        elif isinstance(values[name], dict) and name != "settings":
            yield from undescribed(inner, values[name], f"{path}.{name}")


def test_the_values_file_shows_every_key() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = set(undescribed(SCHEMA, values, ""))
    kubernetes = {f".{name}.resources.limits" for name in ("router_svc", "vision_svc", "llm_svc")}
    assert missing - kubernetes == {".global"}


def test_settings_of_the_schema_are_fresh(tmp_path: Path) -> None:
    made = tmp_path / "values.schema.json"
    command = [sys.executable, str(ROOT / "tools" / "write_chart_schema.py"), "--out", str(made)]
    subprocess.run(command, check=True, timeout=120)
    committed = (CHART / "values.schema.json").read_text()
    assert made.read_text() == committed, "run `python tools/write_chart_schema.py`"
