"""Every setting of the router, read once; knows no environment and no network."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from svc_common.discovery_settings import DiscoverySettings
from svc_common.settings import ServiceSettings
from svc_common.targets import Target

MIB = 1024 * 1024


# A `*` stands for one or more whole labels in front, and only there.
_HOST_ENTRY = re.compile(r"((\*\.)?[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RouterSettings(DiscoverySettings, ServiceSettings):
    """Settings of `python -m router_svc`; each is the variable DAY0_ROUTER_<NAME>."""

    model_config = SettingsConfigDict(env_prefix="DAY0_ROUTER_")

    llm_targets: tuple[str, ...] = Field(min_length=1)
    """Language services: `host:port`, `dns:///name:port` (a replica per address of the name) or
    `kubernetes:///service.namespace:port` (a replica per endpoint of the Service)."""
    load_poll_seconds: Seconds = 1.0
    """How often each replica is asked for its load."""
    probe_timeout_seconds: Seconds = 5.0
    """How long a replica may take to say what it serves and how busy it is."""
    probe_timeouts_allowed: int = Field(default=2, ge=0)
    """Probes in a row that a ready replica may leave unanswered: a stall of the engine is no failure."""
    probe_backoff_seconds: Seconds = 0.5
    """Wait after a replica's first failed probe; doubles with each further one."""
    probe_backoff_max_seconds: Seconds = 10.0
    """Longest wait between two probes of a replica that fails."""

    max_messages: Count = 1024
    """Turns of a chat."""
    max_parts: Count = 4096
    """Parts over all turns of a request."""
    max_text_bytes: Count = 4 * MIB
    """All text parts of a request together, in UTF-8."""
    max_prompt_token_ids: Count = 1_048_576
    """Ready token ids over all parts of a request."""
    max_images: Count = 32
    """Images of a request."""
    max_image_bytes: Count = 20 * MIB
    """One encoded image."""
    max_total_image_bytes: Count = 40 * MIB
    """All encoded images of a request together."""
    max_label_bytes: Count = 1024
    """Label of an image, in UTF-8."""
    max_stop_strings: Count = 16
    """Stop strings of a request."""
    max_stop_bytes: Count = 1024
    """Longest stop string, in UTF-8."""
    max_stop_token_ids: Count = 256
    """Stop token ids of a request."""
    max_logit_bias: Count = 1024
    """Biased tokens of a request."""
    max_logprobs: Count = 20
    """Alternatives whose log-probability may be asked for, per token."""
    max_choices: Count = 16
    """Answers to one request, n."""
    max_answer_tokens: Count = 1_048_576
    """Most tokens over all choices: n * max_tokens."""

    max_inflight_requests: Count = 1024
    """Requests handled at once."""
    max_inflight_bytes: Count = 1024 * MIB
    """Bytes of all requests being handled, images as they came in."""
    max_queued_tokens: Count = 16 * MIB
    """A request is shed when even the least loaded replica has more token-work than this waiting."""

    default_deadline_seconds: Seconds = 600.0
    """Time limit of a request that brings none."""
    max_deadline_seconds: Seconds = 3600.0
    """Longest time limit; a longer one is cut to it."""
    max_attempts: Count = 3
    """Replicas tried for one request before its first token, the first one included."""
    affinity_prefix_bytes: Count = 4096
    """Bytes of a prompt's text that decide which replica is preferred."""
    affinity_extra_requests: int = Field(default=4, ge=0)
    """A preferred replica is taken while it has at most this many requests more than the least loaded one."""
    affinity_extra_tokens: int = Field(default=131_072, ge=0)
    """The same for token-work that waits there."""

    fetch_allowed_hosts: tuple[str, ...] = ()
    """Hosts images may be fetched from: `name`, `*.suffix` or `[v6]`, with `:port` unless 80 or 443; empty: none."""
    fetch_allowed_networks: tuple[str, ...] = ()
    """Networks (CIDR) that may be connected to although they are not public."""
    fetch_timeout_seconds: Seconds = 10.0
    """Time for one image, redirects included."""
    fetch_max_redirects: int = Field(default=3, ge=0)
    """Redirects followed; every hop is checked anew."""
    fetch_max_connections: Count = 64
    """Images fetched at once."""

    @field_validator("llm_targets")
    @classmethod
    def _targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        targets = [Target.parse(text) for text in value]
        if len(set(targets)) < len(targets):
            raise ValueError("the same target is listed twice")
        return value

    @field_validator("fetch_allowed_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            ipaddress.ip_network(text)
        return value

    @field_validator("fetch_allowed_hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not _HOST_ENTRY.fullmatch(text):
                raise ValueError(f"{text!r} is none of name, *.suffix, [v6], each with :port or without")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_image_bytes > self.max_total_image_bytes:
            raise ValueError("max_image_bytes is greater than max_total_image_bytes")
        if self.max_text_bytes + self.max_total_image_bytes > self.max_message_bytes:
            raise ValueError("max_text_bytes + max_total_image_bytes is greater than max_message_bytes")
        if self.default_deadline_seconds > self.max_deadline_seconds:
            raise ValueError("default_deadline_seconds is greater than max_deadline_seconds")
        return self
