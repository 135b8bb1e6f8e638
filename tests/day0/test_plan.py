"""What `day0 serve` would start, for what was asked."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from day0.plan import PlanError, ServeOptions, free_ports, make_plans, takes_images


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm5_next", "vision_config": {}}))
    return str(tmp_path)


@pytest.fixture
def text_checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(tmp_path)


def test_three_services_know_each_other(checkpoint: str) -> None:
    plans = {plan.name: plan for plan in make_plans(ServeOptions(checkpoint, port=0, model_name="m", tier="native"))}
    assert list(plans) == ["vision", "llm", "router"]
    llm = plans["llm"].variables
    assert llm["DAY0_LLM_VISION_TARGET"] == plans["vision"].target
    assert (llm["DAY0_LLM_MODEL"], llm["DAY0_LLM_MODEL_NAME"], llm["DAY0_LLM_TIER"]) == (checkpoint, "m", "native")
    assert plans["router"].variables["DAY0_ROUTER_LLM_TARGETS"] == plans["llm"].target
    ports = [port for plan in plans.values() for port in (plan.grpc_port, plan.health_port, plan.metrics_port)]
    assert len(set(ports)) == 9 and 0 not in ports


def test_port_is_the_routers(checkpoint: str) -> None:
    plans = make_plans(ServeOptions(checkpoint, port=50051))
    assert [plan.grpc_port == 50051 for plan in plans] == [False, False, True]


def test_text_model_needs_no_vision_service(text_checkpoint: str) -> None:
    plans = make_plans(ServeOptions(text_checkpoint, port=0))
    assert [plan.name for plan in plans] == ["llm", "router"]
    assert plans[0].variables["DAY0_LLM_VISION_TARGET"] == ""
    with pytest.raises(PlanError, match="takes no images"):
        make_plans(ServeOptions(text_checkpoint, only="vision"))


def test_one_service_alone(checkpoint: str) -> None:
    (llm,) = make_plans(ServeOptions(checkpoint, only="llm", port=6000, vision_target="v:1"))
    assert (llm.name, llm.grpc_port, llm.variables["DAY0_LLM_VISION_TARGET"]) == ("llm", 6000, "v:1")
    (router,) = make_plans(ServeOptions(None, only="router", llm_targets=("a:1", "b:2")))
    assert router.variables["DAY0_ROUTER_LLM_TARGETS"] == "a:1,b:2"


def test_settings_win(checkpoint: str) -> None:
    plans = make_plans(ServeOptions(checkpoint, port=0, settings=("llm.cache_tokens=8192", "router.grpc_port=7001")))
    assert plans[1].variables["DAY0_LLM_CACHE_TOKENS"] == "8192"
    assert plans[2].grpc_port == 7001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ServeOptions(None), "MODEL: the folder or URI"),
        (ServeOptions(None, only="router"), "--llm-target: needed"),
        (ServeOptions("/nowhere"), "MODEL: /nowhere: it does not exist: no such folder"),
        (ServeOptions("ftp://host/m"), "MODEL: ftp://host/m: the URI is not supported"),
        (ServeOptions(None, only="other"), "--only: one of vision, llm, router, got 'other'"),
    ],
)
def test_bad_requests_name_the_option(options: ServeOptions, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plans(options)
    assert message in str(caught.value)


@pytest.mark.parametrize("item", ["llm", "llm=1", "cache_tokens=1", "other.x=1", "llm.=1"])
def test_bad_settings_are_shown(checkpoint: str, item: str) -> None:
    with pytest.raises(PlanError, match="--set"):
        make_plans(ServeOptions(checkpoint, settings=(item,)))


def test_config_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match=r"MODEL: config\.json in .* is not JSON"):
        takes_images(str(tmp_path))


def test_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(PlanError, match=f"MODEL: {tmp_path} has no config.json"):
        takes_images(str(tmp_path))


def test_uri_is_read_and_handed_on(checkpoint: str) -> None:
    uri = f"file://{checkpoint}"
    plans = {plan.name: plan for plan in make_plans(ServeOptions(uri, port=0))}
    assert list(plans) == ["vision", "llm", "router"]
    assert plans["vision"].variables["DAY0_VISION_MODEL"] == plans["llm"].variables["DAY0_LLM_MODEL"] == uri


def test_free_ports_differ_and_can_be_had() -> None:
    ports = free_ports("127.0.0.1", 5)
    assert len(set(ports)) == 5
    with socket.socket() as one:
        one.bind(("127.0.0.1", ports[0]))


def test_foreign_host_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--host: cannot listen on 192\.0\.2\.1"):
        free_ports("192.0.2.1", 1)
