"""Turns the configured targets into the addresses of replicas; knows no gRPC call and no health."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

DNS_SCHEME = "dns:///"


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One configured entry. A name behind `dns:///` stands for one replica per address it resolves to."""

    host: str
    port: int
    expand: bool

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads `host:port`, `[v6]:port` or `dns:///name:port`; anything else is a ValueError that quotes it."""
        expand = text.lower().startswith(DNS_SCHEME)
        rest = text[len(DNS_SCHEME) :] if expand else text
        host, colon, port_text = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        malformed = not colon or not host or "/" in host or host != host.strip() or (":" in host and not bracketed)
        if malformed or not (port_text.isascii() and port_text.isdigit()) or not 0 < int(port_text) < 65536:
            raise ValueError(f"target {text!r} is neither host:port nor dns:///name:port with a port from 1 to 65535")
        return cls(host=host, port=int(port_text), expand=expand)


def address_text(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 host: the form gRPC takes as a target."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def resolve(target: Target) -> frozenset[str]:
    """Addresses `target` stands for now: one per A and AAAA record behind `dns:///`, else the target itself.

    Raises OSError when the name does not resolve, so that the caller can keep what it has.
    """
    if not target.expand:
        return frozenset({address_text(target.host, target.port)})
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{target.host!r} cannot be a domain name") from error
    return frozenset(address_text(str(sockaddr[0]), target.port) for _, _, _, _, sockaddr in answers)
