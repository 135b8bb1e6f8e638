"""Reads configured targets and resolves them by DNS; knows no gRPC call, no health and no cluster's API."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Literal

DNS_SCHEME = "dns:///"
KUBERNETES_SCHEME = "kubernetes:///"


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One configured entry.

    `dns:///name:port` stands for one replica per address that the name resolves to, `kubernetes:///service.namespace:port`
    for one per endpoint that the EndpointSlices of a Service list.
    """

    host: str
    port: int
    kind: Literal["address", "dns", "kubernetes"]

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads `host:port`, `[v6]:port` or one of the two schemes; anything else is a ValueError that quotes it."""
        kind: Literal["address", "dns", "kubernetes"] = "address"
        rest = text
        if text.lower().startswith(DNS_SCHEME):
            kind, rest = "dns", text[len(DNS_SCHEME) :]
        elif text.lower().startswith(KUBERNETES_SCHEME):
            kind, rest = "kubernetes", text[len(KUBERNETES_SCHEME) :]
        host, colon, port_text = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        malformed = not colon or not host or "/" in host or host != host.strip() or (":" in host and not bracketed)
        if kind == "kubernetes":
            malformed = malformed or bracketed or not all(host.split(".")) or host.count(".") != 1
        if malformed or not (port_text.isascii() and port_text.isdigit()) or not 0 < int(port_text) < 65536:
            raise ValueError(
                f"target {text!r} is none of host:port, dns:///name:port and kubernetes:///service.namespace:port "
                "with a port from 1 to 65535"
            )
        return cls(host=host, port=int(port_text), kind=kind)

    @property
    def expands(self) -> bool:
        """Whether the replicas behind it may change."""
        return self.kind != "address"

    @property
    def dns_name(self) -> str:
        """The name to resolve; a Service's own for a Kubernetes target."""
        return f"{self.host}.svc" if self.kind == "kubernetes" else self.host


def address_text(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 host: the form gRPC takes as a target."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def resolve(target: Target) -> frozenset[str]:
    """Addresses `target` stands for now by DNS: one per A and AAAA record of a name, else the target itself.

    Raises OSError when the name does not resolve, so that the caller can keep what it has.
    """
    if not target.expands:
        return frozenset({address_text(target.host, target.port)})
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(target.dns_name, target.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{target.host!r} cannot be a domain name") from error
    return frozenset(address_text(str(sockaddr[0]), target.port) for _, _, _, _, sockaddr in answers)
