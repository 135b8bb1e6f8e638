"""Works out which service processes to start and with which settings; starts nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from svc_common.object_store import ObjectStore
from svc_common.store_errors import StoreError

SERVICES = ("vision", "llm", "router")
FULL_NAMES = {
    "router": "day0.router.v1.RouterService",
    "vision": "day0.vision.v1.VisionService",
    "llm": "day0.llm.v1.LanguageService",
}


class PlanError(ValueError):
    """What was asked for cannot be started; the message names the option."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process: `python -m <name>_svc` with `variables` on top of the environment."""

    name: str
    host: str
    grpc_port: int
    health_port: int
    metrics_port: int
    variables: Mapping[str, str]

    @property
    def target(self) -> str:
        """Where it will answer."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def full_name(self) -> str:
        """The service whose readiness says that it is up."""
        return FULL_NAMES[self.name]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `day0 serve` was asked for. `port` is that of the router, or of the only service; 0 is any free one.

    `model` is a folder, or its s3://, gs://, az:// or file:// URI.
    """

    model: str | None
    only: str | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    model_name: str = ""
    tier: str = "auto"
    vision_target: str = ""
    llm_targets: tuple[str, ...] = ()
    settings: tuple[str, ...] = field(default=())


def make_plans(options: ServeOptions) -> list[ServicePlan]:
    """The processes in the order vision, language, router. Raises PlanError; reads the checkpoint's config only."""
    if options.only is not None and options.only not in SERVICES:
        raise PlanError(f"--only: one of {', '.join(SERVICES)}, got {options.only!r}")
    wanted = [options.only] if options.only else list(SERVICES)
    if options.model is None and wanted != ["router"]:
        raise PlanError("MODEL: the folder or URI of a checkpoint is needed to run the " + " and ".join(wanted))
    if wanted == ["router"] and not options.llm_targets:
        raise PlanError("--llm-target: needed with --only router, as host:port or dns:///name:port")
    if options.model is not None:
        sees = takes_images(options.model)
        if not sees and options.only == "vision":
            raise PlanError(f"--only vision: {options.model} takes no images (its config.json has no vision_config)")
        if not sees and "vision" in wanted:
            wanted.remove("vision")
    chosen = _settings(options.settings, wanted)
    ports = _ports(wanted, options)
    plans: dict[str, ServicePlan] = {}
    for name in wanted:
        grpc_port, health_port, metrics_port = ports[name]
        values = {
            "HOST": options.host,
            "GRPC_PORT": str(grpc_port),
            "HEALTH_PORT": str(health_port),
            "METRICS_PORT": str(metrics_port),
            **_own_settings(name, options, plans),
            **chosen[name],
        }
        prefix = f"DAY0_{name.upper()}_"
        plans[name] = ServicePlan(
            name,
            values["HOST"],
            int(values["GRPC_PORT"]),
            int(values["HEALTH_PORT"]),
            int(values["METRICS_PORT"]),
            {prefix + key: value for key, value in values.items()},
        )
    return list(plans.values())


def takes_images(model: str) -> bool:
    """Whether the checkpoint has a vision part. Raises PlanError where the folder holds no readable config.json."""
    try:
        store = ObjectStore(model)
        file = next((file for file in store.list() if file.name == "config.json"), None)
        content = store.read(file) if file else None
    except StoreError as error:
        raise PlanError(f"MODEL: {error}") from None
    if content is None:
        raise PlanError(f"MODEL: {model} has no config.json")
    try:
        config = json.loads(content)
    except ValueError as error:
        raise PlanError(f"MODEL: config.json in {model} is not JSON: {error}") from None
    return isinstance(config, dict) and "vision_config" in config


def _own_settings(name: str, options: ServeOptions, plans: Mapping[str, ServicePlan]) -> dict[str, str]:
    if name == "router":
        targets = options.llm_targets or (plans["llm"].target,)
        # On one machine the replica is up in seconds; the router should see it at once.
        return {"LLM_TARGETS": ",".join(targets), "PROBE_BACKOFF_MAX_SECONDS": "1"}
    assert options.model is not None
    own = {"MODEL": options.model}
    if options.model_name:
        own["MODEL_NAME"] = options.model_name
    if name == "llm":
        own["TIER"] = options.tier
        own["VISION_TARGET"] = plans["vision"].target if "vision" in plans else options.vision_target
    return own


def _settings(settings: Sequence[str], wanted: Sequence[str]) -> dict[str, dict[str, str]]:
    chosen: dict[str, dict[str, str]] = {name: {} for name in wanted}
    for item in settings:
        key, equals, value = item.partition("=")
        service, dot, name = key.partition(".")
        if not equals or not dot or not name:
            raise PlanError(f"--set: wants SERVICE.FIELD=VALUE, got {item!r}")
        if service not in wanted:
            raise PlanError(f"--set: {item!r} is for {service!r}, but what starts is {', '.join(wanted)}")
        chosen[service][name.upper()] = value
    return chosen


def _ports(wanted: Sequence[str], options: ServeOptions) -> dict[str, tuple[int, int, int]]:
    """gRPC, health and metrics ports of each service: the front one's gRPC port as asked, any free one elsewhere."""
    front = wanted[-1]
    free = iter(free_ports(options.host, 3 * len(wanted)))
    ports: dict[str, tuple[int, int, int]] = {}
    for name in wanted:
        grpc_port = next(free)
        ports[name] = (options.port if name == front and options.port else grpc_port, next(free), next(free))
    return ports


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports that were free a moment ago. Raises PlanError where the host is not this machine's."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                one.bind((host, 0))
            except OSError as error:
                raise PlanError(f"--host: cannot listen on {host}: {error.strerror}") from None
            ports.append(int(one.getsockname()[1]))
        return ports
