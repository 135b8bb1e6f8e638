"""Every variable of the chart is a setting and every setting is a variable of the chart; values arrive as written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from svc_common.settings import ServiceSettings, read_settings
from tests.chart.rendering import (
    CHART,
    NEW,
    OLD,
    PRESETS,
    SERVICES,
    Helm,
    container,
    environment,
    of_kind,
    service_pods,
)
from tools.write_chart_schema import OWNED
from tools.write_chart_schema import SERVICES as CLASSES

DEFINITIONS = json.loads((CHART / "values.schema.json").read_text())["definitions"]


def settings_class(component: str) -> type[ServiceSettings]:
    return CLASSES[SERVICES[component]]


def variables(component: str) -> set[str]:
    """All that a service reads."""
    return {f"DAY0_{component.upper()}_{field.upper()}" for field in settings_class(component).model_fields}


def default_of(cls: type[ServiceSettings], field: str) -> Any:
    default = cls.model_fields[field].default
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("version", [OLD, NEW])
def test_services_accept_what_the_chart_sets(helm: Helm, preset: str, version: str) -> None:
    pods = service_pods(helm.template(preset, version=version))
    assert {"router", "llm"} <= {component for component, _ in pods}
    for component, template in pods:
        given = environment(template)
        assert set(given) <= variables(component)
        read_settings(settings_class(component), given)


def test_every_setting_can_be_set_and_arrives(helm: Helm, tmp_path: Path) -> None:
    values = {
        service: {
            "settings": {field: default_of(cls, field) for field in cls.model_fields if field not in OWNED[service]},
            "preStopSeconds": 0,
        }
        for service, cls in CLASSES.items()
    }
    for component, template in service_pods(helm.template("cpu", values=yaml.safe_dump(values), tmp_path=tmp_path)):
        given = environment(template)
        assert set(given) == variables(component)
        cls = settings_class(component)
        read = read_settings(cls, given)
        for field in values[SERVICES[component]]["settings"]:
            assert getattr(read, field) == cls.model_fields[field].default, field


@pytest.mark.parametrize("service", CLASSES)
def test_a_field_is_the_users_or_the_charts(service: str) -> None:
    users = set(DEFINITIONS[f"{service}_settings"]["properties"])
    assert not users & OWNED[service]
    assert users | OWNED[service] == set(CLASSES[service].model_fields)


# Case 64. YAML numbers reach a template as floats.
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("1048576", "1048576"),
        ("'1048576'", "1048576"),
        ("1.048576e6", "1048576"),
        ("9007199254740991", "9007199254740991"),
        ("'9223372036854775807'", "9223372036854775807"),
        ("20161216", "20161216"),
    ],
)
def test_large_integer_survives(helm: Helm, tmp_path: Path, written: str, text: str) -> None:
    values = f"llm_svc: {{settings: {{drain_seconds: 30, cache_tokens: {written}}}}}"
    (pod,) = [
        pod for name, pod in service_pods(helm.template("cpu", values=values, tmp_path=tmp_path)) if name == "llm"
    ]
    assert environment(pod)["DAY0_LLM_CACHE_TOKENS"] == text
    assert read_settings(settings_class("llm"), environment(pod)).cache_tokens == int(text)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("option", "written"), [("--set", "1048576"), ("--set-string", "1048576"), ("--set-json", "1048576")]
)
def test_large_integer_survives_the_command_line(helm: Helm, option: str, written: str) -> None:
    manifests = helm.template("cpu", option, f"llm_svc.settings.cache_tokens={written}")
    (pod,) = [pod for name, pod in service_pods(manifests) if name == "llm"]
    assert environment(pod)["DAY0_LLM_CACHE_TOKENS"] == "1048576"


@pytest.mark.parametrize(
    ("service", "field", "written", "text"),
    [
        ("llm", "prefix_cache", "false", "false"),
        ("llm", "prefix_cache", "'true'", "true"),
        ("llm", "template_seconds", "0.25", "0.25"),
        ("llm", "experts_convert_tokens", "-1", "-1"),
        ("vision", "background", "[0, 127, 255]", "0,127,255"),
        ("router", "fetch_allowed_hosts", "[a.example, '*.b.example']", "a.example,*.b.example"),
        ("router", "fetch_allowed_hosts", "[]", ""),
    ],
)
def test_other_kinds_survive(helm: Helm, tmp_path: Path, service: str, field: str, written: str, text: str) -> None:
    values = f"{service}_svc: {{settings: {{{field}: {written}}}}}"
    pods = dict(service_pods(helm.template("cpu", values=values, tmp_path=tmp_path)))
    assert environment(pods[service])[f"DAY0_{service.upper()}_{field.upper()}"] == text


@pytest.mark.parametrize("tag", ["20161216", "0123", "1e3", "true"])
def test_a_tag_stays_text(helm: Helm, tmp_path: Path, tag: str) -> None:
    manifests = helm.template("cpu", values=f"images: {{tag: '{tag}'}}", tmp_path=tmp_path)
    assert {container(pod)["image"].split(":")[1] for _, pod in service_pods(manifests)} == {tag}


def test_texts_that_look_like_other_kinds_stay_texts(helm: Helm) -> None:
    manifests = helm.template("everything")
    for name, pod in service_pods(manifests):
        if name == "llm":
            annotations = pod["metadata"]["annotations"]
            assert annotations == {"example.com/keep": "true", "example.com/number": "0123"}
    # Counts are numbers in the manifest, not floats.
    (group,) = of_kind(manifests, "LeaderWorkerSet")
    assert type(group["spec"]["leaderWorkerTemplate"]["size"]) is int
    grace = {type(pod["spec"]["terminationGracePeriodSeconds"]) for _, pod in service_pods(manifests)}
    assert grace == {int}
