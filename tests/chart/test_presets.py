"""Every preset lints and renders for an old and a new cluster, as objects that those clusters know."""

from __future__ import annotations

import kubernetes_validate
import pytest

from tests.chart.rendering import (
    NEW,
    OLD,
    PRESETS,
    SERVICES,
    Helm,
    Manifest,
    Refused,
    component,
    of_kind,
    pod_templates,
)

# kubernetes-validate begins with 1.25.
OLDEST_SCHEMA = "1.25"
NEWEST_SCHEMA = "1.37"
# Definitions of others, which it does not have; their pods are validated as pods.
FOREIGN = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet"}
# What 1.20 has and 1.25 no longer.
GONE = {"policy/v1beta1", "autoscaling/v2beta2"}


@pytest.mark.parametrize("preset", PRESETS)
def test_lints(helm: Helm, preset: str) -> None:
    assert "0 chart(s) failed" in helm.lint(preset)


def validate(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("cluster", "schema"), [(OLD, OLDEST_SCHEMA), (NEW, NEWEST_SCHEMA)])
def test_objects_are_valid(helm: Helm, preset: str, cluster: str, schema: str) -> None:
    manifests = helm.template(preset, version=cluster)
    for manifest in manifests:
        if manifest["kind"] in FOREIGN:
            continue
        if manifest["apiVersion"] in GONE:
            assert cluster == OLD
            continue
        validate(manifest, schema)
    for name, template in pod_templates(manifests):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"] | {"name": name}}
        validate(pod | {"spec": template["spec"]}, schema)


def test_the_validation_sees_an_unknown_field(helm: Helm) -> None:
    (service, *_) = of_kind(helm.template("cpu"), "Service")
    service["spec"]["clusterip"] = "None"
    with pytest.raises(kubernetes_validate.ValidationError, match="clusterip"):
        validate(service, NEWEST_SCHEMA)


@pytest.mark.parametrize(
    ("cluster", "versions"),
    [(OLD, {"policy/v1beta1", "autoscaling/v2beta2"}), (NEW, {"policy/v1", "autoscaling/v2"})],
)
def test_versions_are_those_of_the_cluster(helm: Helm, cluster: str, versions: set[str]) -> None:
    manifests = helm.template("everything", version=cluster)
    changed = of_kind(manifests, "PodDisruptionBudget", "HorizontalPodAutoscaler")
    assert {manifest["apiVersion"] for manifest in changed} == versions


def test_native_probes_are_refused_where_there_are_none(helm: Helm) -> None:
    with pytest.raises(
        Refused, match=r"probes\.style: grpc needs Kubernetes 1\.24, the cluster has v1\.20\.2; set exec"
    ):
        helm.template("cpu", "--set", "probes.style=grpc", version=OLD)


@pytest.mark.parametrize("preset", PRESETS)
def test_names_are_unique_and_labels_complete(helm: Helm, preset: str) -> None:
    manifests = helm.template(preset)
    keys = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(keys)) == len(keys)
    for manifest in manifests:
        assert manifest["metadata"]["namespace"] == "serving"
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "big"
        assert {"app.kubernetes.io/name", "app.kubernetes.io/version", "helm.sh/chart"} <= set(labels)
        assert component(manifest) in {*SERVICES, "alerts", "test"}


def test_a_long_release_name_stays_within_a_label(helm: Helm) -> None:
    manifests = helm.template("everything", "--set", f"fullnameOverride={'x' * 63}")
    assert max(len(manifest["metadata"]["name"]) for manifest in manifests) <= 63


@pytest.mark.parametrize("preset", PRESETS)
def test_notes_say_how_to_call(helm: Helm, preset: str) -> None:
    notes = helm.notes(preset)
    assert "port-forward svc/big-day0-router 50051:50051" in notes
    assert "helm test big -n serving" in notes
    assert ("this version of the service runs a model on one node" in notes) == (preset == "everything")
    assert ("no byte of the weights is verified" in notes) == (preset == "old-cluster")
