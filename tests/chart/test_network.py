"""Network policies let through what the walk of a request needs, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.rendering import Helm, Manifest, component, of_kind

Rule = dict[str, Any]


def policies(helm: Helm, preset: str, *more: str) -> dict[str, Manifest]:
    found = of_kind(helm.template(preset, *more), "NetworkPolicy")
    for policy in found:
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component(policy)
    return {component(policy): policy["spec"] for policy in found}


def rule_for(rules: list[Rule], port: int, protocol: str = "TCP") -> Rule:
    (found,) = [rule for rule in rules if {"port": port, "protocol": protocol} in rule.get("ports", [])]
    return found


def peers(rule: Rule, side: str) -> set[str]:
    """Components a rule names."""
    return {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule[side]}


def ports(rules: list[Rule]) -> set[int]:
    return {entry["port"] for rule in rules for entry in rule.get("ports", [])}


def test_each_service_is_reached_by_the_one_above_it(helm: Helm) -> None:
    specs = policies(helm, "cpu")
    assert set(specs) == {"router", "vision", "llm"}
    assert peers(rule_for(specs["llm"]["ingress"], 50051), "from") == {"router"}
    assert peers(rule_for(specs["vision"]["ingress"], 50051), "from") == {"llm"}
    assert "from" not in rule_for(specs["router"]["ingress"], 50051)
    assert peers(rule_for(specs["router"]["egress"], 50051), "to") == {"llm"}
    assert peers(rule_for(specs["llm"]["egress"], 50051), "to") == {"vision"}
    for spec in specs.values():
        assert ports(spec["ingress"]) == {50051, 9090}
        assert rule_for(spec["egress"], 53, "UDP") == rule_for(spec["egress"], 53)


def test_only_readers_of_weights_reach_the_store(helm: Helm) -> None:
    specs = policies(helm, "cpu")
    assert ports(specs["router"]["egress"]) == {53, 50051, 443, 6443}
    for name, own in (("vision", set()), ("llm", {50051, 6443})):
        assert ports(specs[name]["egress"]) == {53, 443, 80} | own
        blocks = [peer["ipBlock"]["cidr"] for peer in rule_for(specs[name]["egress"], 80)["to"]]
        assert blocks == ["169.254.169.254/32", "169.254.170.23/32"]


@pytest.mark.parametrize("uri", ["/models/small", "file:///models/small"])
def test_a_mounted_model_needs_no_store(helm: Helm, uri: str) -> None:
    specs = policies(helm, "cpu", "--set", f"model.uri={uri}")
    assert ports(specs["vision"]["egress"]) == {53}
    # The cluster's API, which tells where the vision service is.
    assert ports(specs["llm"]["egress"]) == {53, 50051, 443, 6443}
    without = policies(helm, "cpu", "--set", f"model.uri={uri},discovery=dns")
    assert ports(without["llm"]["egress"]) == ports(without["router"]["egress"]) == {53, 50051}


def test_named_clients_and_scrapers_replace_everybody(helm: Helm) -> None:
    specs = policies(helm, "everything")
    callers = rule_for(specs["router"]["ingress"], 50051)["from"]
    assert callers[0] == {"namespaceSelector": {"matchLabels": {"team": "apps"}}}
    assert peers({"from": callers[1:]}, "from") == {"test"}
    for spec in specs.values():
        (scraper,) = rule_for(spec["ingress"], 9090)["from"]
        assert scraper["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    # Fetching of images is on in this preset.
    assert "to" not in rule_for(specs["router"]["egress"], 80)


def test_targets_elsewhere_are_reached_on_their_ports(helm: Helm) -> None:
    more = "router_svc.llmTargets={llm.example:7001,dns:///llms.example:7002},llm_svc.visionTarget=vision.example:7003"
    specs = policies(helm, "text-only", "--set", f"networkPolicy.enabled=true,{more}")
    assert ports(specs["router"]["egress"]) == {53, 7001, 7002}
    assert {53, 7003} <= ports(specs["llm"]["egress"]) and 50051 not in ports(specs["llm"]["egress"])


def test_ranks_of_a_group_reach_each_other(helm: Helm) -> None:
    spec = policies(helm, "everything")["llm"]
    among = [rule for rule in (*spec["ingress"], *spec["egress"]) if "ports" not in rule]
    assert [peers(rule, side) for rule, side in zip(among, ("from", "to"), strict=True)] == [{"llm"}, {"llm"}]


def test_off_means_off(helm: Helm) -> None:
    assert not policies(helm, "text-only")
