"""Pods are locked down, have the ports and probes of the conventions, and time enough to start and to end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from protos.llm.v1 import llm_pb2
from protos.router.v1 import router_pb2
from protos.vision.v1 import vision_pb2
from svc_common.targets import Target
from tests.chart.rendering import (
    PRESETS,
    Helm,
    Manifest,
    component,
    container,
    environment,
    of_kind,
    pod_templates,
    service_pods,
)

PORTS = {"grpc": 50051, "health": 50052, "metrics": 9090}
FULL_NAMES = {
    "router": router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name,
    "vision": vision_pb2.DESCRIPTOR.services_by_name["VisionService"].full_name,
    "llm": llm_pb2.DESCRIPTOR.services_by_name["LanguageService"].full_name,
}
# What a server needs after its drain limit: last words, twice, and the process' own end.
AFTER_DRAIN_SECONDS = 5


@pytest.mark.parametrize("preset", PRESETS)
def test_pods_are_locked_down(helm: Helm, preset: str) -> None:
    for name, template in pod_templates(helm.template(preset)):
        pod, only = template["spec"], container(template)
        follows = any(text.startswith("kubernetes:///") for text in environment(template).values())
        assert pod["automountServiceAccountToken"] is follows, name
        assert pod["enableServiceLinks"] is False, name
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all(set(volume) & {"emptyDir", "persistentVolumeClaim"} for volume in pod["volumes"])
        assert only["resources"]["limits"]["memory"]


@pytest.mark.parametrize("preset", PRESETS)
def test_accounts_may_read_endpoint_slices_and_nothing_else(helm: Helm, preset: str) -> None:
    manifests = helm.template(preset)
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding", "Secret")
    follow = {
        name: template["spec"]["serviceAccountName"]
        for name, template in service_pods(manifests)
        if any(text.startswith("kubernetes:///") for text in environment(template).values())
    }
    roles = {component(role): role for role in of_kind(manifests, "Role")}
    bindings = {component(binding): binding for binding in of_kind(manifests, "RoleBinding")}
    assert set(roles) == set(bindings) == set(follow) and "vision" not in follow
    for name, role in roles.items():
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
        binding = bindings[name]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": follow[name], "namespace": "serving"}]
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "serving"
    accounts = of_kind(manifests, "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    made = {account["metadata"]["name"] for account in accounts}
    assert {template["spec"]["serviceAccountName"] for _, template in service_pods(manifests)} == made


def test_with_dns_nothing_may_call_the_api_server(helm: Helm) -> None:
    manifests = helm.template("cpu", "--set", "discovery=dns")
    assert not of_kind(manifests, "Role", "RoleBinding")
    for _, template in service_pods(manifests):
        assert template["spec"]["automountServiceAccountToken"] is False
    targets = environment(dict(service_pods(manifests))["router"])["DAY0_ROUTER_LLM_TARGETS"]
    assert targets == "dns:///big-day0-llm.serving.svc:50051"


def test_workload_identity_is_an_annotation(helm: Helm) -> None:
    accounts = {component(account): account for account in of_kind(helm.template("cpu"), "ServiceAccount")}
    assert "annotations" not in accounts["router"]["metadata"]
    for name in ("vision", "llm"):
        assert list(accounts[name]["metadata"]["annotations"]) == ["eks.amazonaws.com/role-arn"]


def test_an_account_of_somebody_else_is_used_not_made(helm: Helm) -> None:
    manifests = helm.template("cpu", "--set", "llm_svc.serviceAccount.create=false,llm_svc.serviceAccount.name=ours")
    assert "llm" not in set(map(component, of_kind(manifests, "ServiceAccount")))
    assert dict(service_pods(manifests))["llm"]["spec"]["serviceAccountName"] == "ours"


def test_credentials_come_by_reference_and_only_to_those_who_read_weights(helm: Helm) -> None:
    for name, template in service_pods(helm.template("everything")):
        references = container(template).get("envFrom", [])
        expected = [] if name == "router" else [{"secretRef": {"name": "store-credentials"}}]
        assert references == expected, name


@pytest.mark.parametrize("preset", PRESETS)
def test_ports(helm: Helm, preset: str) -> None:
    manifests = helm.template(preset)
    for name, template in service_pods(manifests):
        ports = container(template)["ports"]
        assert {port["name"]: port["containerPort"] for port in ports} == PORTS
        given = environment(template)
        for port, number in PORTS.items():
            assert given[f"DAY0_{name.upper()}_{port.upper()}_PORT"] == str(number)
        assert given[f"DAY0_{name.upper()}_HOST"] == "0.0.0.0"
        assert all(port["protocol"] == "TCP" for port in ports)
    for service in of_kind(manifests, "Service"):
        assert all(port["protocol"] == "TCP" for port in service["spec"]["ports"])
        assert all(PORTS[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])


@pytest.mark.parametrize("preset", PRESETS)
def test_services_select_their_pods_and_targets_are_headless(helm: Helm, preset: str) -> None:
    manifests = helm.template(preset)
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(manifests, "Service")}
    for name, spec in services.items():
        # A worker index is put on its pods by the LeaderWorkerSet's controller.
        selector = {key: text for key, text in spec["selector"].items() if not key.startswith("leaderworkerset")}
        selected = [
            kind for kind, pod in service_pods(manifests) if selector.items() <= pod["metadata"]["labels"].items()
        ]
        assert len(set(selected)) == 1 and selected[0] in name
    pods = dict(service_pods(manifests))
    targets = [
        environment(pods["router"])["DAY0_ROUTER_LLM_TARGETS"],
        environment(pods["llm"])["DAY0_LLM_VISION_TARGET"],
    ]
    for target in filter(None, targets):
        read = Target.parse(target)
        name, namespace = read.host.split(".")
        assert (services[name]["clusterIP"], namespace, read.port) == ("None", "serving", 50051)
    assert bool(targets[1]) == ("vision" in pods)
    assert services["big-day0-router"]["ports"][0]["name"] == "grpc" and len(services["big-day0-router"]["ports"]) == 1


def asked(probe: Manifest) -> tuple[int, str]:
    """Port and service name a probe asks for, in either style."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"]["service"]
    command = probe["exec"]["command"]
    assert command[:3] == ["python", "-m", "svc_common.health_probe"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert float(options["--timeout-seconds"]) < probe["timeoutSeconds"]
    return int(options["--port"]), options["--service"]


@pytest.mark.parametrize("style", ["grpc", "exec"])
@pytest.mark.parametrize("preset", ["cpu", "gpu", "everything"])
def test_probes_ask_the_health_port(helm: Helm, preset: str, style: str) -> None:
    pods = service_pods(helm.template(preset, "--set", f"probes.style={style}"))
    for name, template in pods:
        only = container(template)
        assert asked(only["startupProbe"]) == asked(only["readinessProbe"]) == (PORTS["health"], FULL_NAMES[name])
        assert asked(only["livenessProbe"]) == (PORTS["health"], "")
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert (style in only[kind]) and "initialDelaySeconds" not in only[kind]
        liveness = only["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] == 120
    if preset == "everything":
        assert [name for name, _ in pods].count("llm") == 2, "a probe on every rank"


@pytest.mark.parametrize(
    ("weights", "rate", "headroom", "budget"),
    [
        # 300 s for all but the weights; then headroom * bytes / rate, rounded up.
        ("1", 1_000_000_000, 2, 301),
        ("130000000000", 500_000_000, 3, 300 + 780),
        ("'1500000000000'", 104_857_600, 2, 300 + 28_611),
        ("9007199254740991", 1_000_000_000_000, 100, 300 + 900_720),
    ],
)
def test_startup_budget_follows_from_bytes_and_rate(
    helm: Helm, tmp_path: Path, weights: str, rate: int, headroom: int, budget: int
) -> None:
    assert budget == 300 + math.ceil(int(weights.strip("'")) * headroom / rate)
    values = (
        f"{{model: {{weightBytes: {weights}}}, llm_svc: {{startup: {{bytesPerSecond: {rate}, headroom: {headroom}}}}}}}"
    )
    manifests = helm.template("cpu", values=values, tmp_path=tmp_path)
    probe = container(dict(service_pods(manifests))["llm"])["startupProbe"]
    assert budget <= probe["periodSeconds"] * probe["failureThreshold"] < budget + probe["periodSeconds"]
    (deployment,) = [one for one in of_kind(manifests, "Deployment") if component(one) == "llm"]
    assert deployment["spec"]["progressDeadlineSeconds"] > budget


@pytest.mark.parametrize("preset", PRESETS)
def test_grace_exceeds_pre_stop_and_drain(helm: Helm, preset: str) -> None:
    for name, template in service_pods(helm.template(preset)):
        sleep, seconds = container(template)["lifecycle"]["preStop"]["exec"]["command"]
        drain = float(environment(template)[f"DAY0_{name.upper()}_DRAIN_SECONDS"])
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert sleep == "sleep" and int(seconds) > 0
        assert grace > int(seconds) + drain
        # The preset that sets it by hand is at the edge of what is accepted.
        if (preset, name) != ("everything", "llm"):
            assert grace >= int(seconds) + drain + AFTER_DRAIN_SECONDS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_failed_start_is_told_and_shared_memory_is_there(helm: Helm, preset: str) -> None:
    for name, template in service_pods(helm.template(preset)):
        only = container(template)
        assert only["terminationMessagePolicy"] == "FallbackToLogsOnError"
        mounts = {mount["mountPath"]: mount for mount in only["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert "/tmp" in mounts and {mount["name"] for mount in mounts.values()} == set(volumes)
        assert ("/dev/shm" in mounts) == (name == "llm")
        if name == "llm":
            assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert ("/models" in mounts) == (preset == "old-cluster" and name != "router")


def test_group_restarts_together_and_only_leaders_are_called(helm: Helm) -> None:
    manifests = helm.template("everything")
    (group,) = of_kind(manifests, "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert (template["restartPolicy"], template["size"]) == ("RecreateGroupOnPodRestart", 4)
    assert "llm" not in set(map(component, of_kind(manifests, "Deployment")))
    (service,) = [one for one in of_kind(manifests, "Service") if component(one) == "llm"]
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_disruption_budgets_select_the_pods(helm: Helm) -> None:
    manifests = helm.template("cpu")
    budgets = {component(budget): budget["spec"] for budget in of_kind(manifests, "PodDisruptionBudget")}
    pods = dict(service_pods(manifests))
    assert set(budgets) == set(pods)
    for name, spec in budgets.items():
        assert spec["maxUnavailable"] == 1
        assert spec["selector"]["matchLabels"].items() <= pods[name]["metadata"]["labels"].items()
