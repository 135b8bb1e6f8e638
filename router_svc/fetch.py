"""Fetches a picture from an allowed http(s) URL without becoming a door to the inside; knows no gRPC and no request.

Every hop is checked by name against the allow-list, and every connection goes to the very address that was checked: the
HTTP pool has no resolver of its own, it asks `GuardedBackend` for its sockets. The environment's proxies are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore2

from svc_common.errors import InvalidArgument, ResourceExhausted, ServiceError, Unavailable
from svc_common.targets import address_text

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Public by number, yet answered by the platform's own metadata service (Azure).
_METADATA = frozenset({ipaddress.IPv4Address("168.63.129.16")})


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What may be fetched. `hosts` holds `name`, `*.suffix` or `[v6]`, each with `:port` or for 80 and 443."""

    hosts: tuple[str, ...]
    networks: tuple[Network, ...]
    max_bytes: int
    max_redirects: int
    timeout_seconds: float
    max_connections: int

    def allows_host(self, host: str, port: int) -> bool:
        """Whether the allow-list names this host with this port."""
        return any(_matches(entry.lower(), host, port) for entry in self.hosts)

    def allows_address(self, address: Address) -> bool:
        """Whether a connection to this address is permitted: public unicast, or inside a configured network."""
        plain = _unwrap(address)
        if any(candidate in network for network in self.networks for candidate in (address, plain)):
            return True
        return plain.is_global and not plain.is_multicast and not plain.is_reserved and plain not in _METADATA


def _matches(entry: str, host: str, port: int) -> bool:
    name, allowed_ports = entry, frozenset(_DEFAULT_PORTS.values())
    before, colon, after = entry.rpartition(":")
    if colon and not entry.endswith("]"):
        name, allowed_ports = before, frozenset({int(after)})
    name = name.strip("[]")
    if port not in allowed_ports:
        return False
    return host.endswith(name[1:]) and len(host) >= len(name) if name.startswith("*.") else host == name


def _unwrap(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one that merely carries it, since that is where packets end up."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


class AddressRefused(Exception):
    """A name resolved to nothing that may be connected to."""


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Opens sockets for the HTTP pool: resolves, checks, and connects to the checked address."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._sockets = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connects to the first permitted address of `host`; raises AddressRefused when there is none."""
        addresses = await _resolve(host, port)
        permitted = [address for address in addresses if self._policy.allows_address(address)]
        if not permitted:
            raise AddressRefused(host)
        return await self._sockets.connect_tcp(
            str(permitted[0]), port, timeout=timeout, local_address=local_address, socket_options=socket_options
        )

    async def sleep(self, seconds: float) -> None:
        """Waits between the pool's attempts."""
        await asyncio.sleep(seconds)


async def _resolve(host: str, port: int) -> Sequence[Address]:
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # UnicodeError: a name that cannot be a domain name, such as one with an empty label.
        raise httpcore2.ConnectError(str(error)) from error
    return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for _, _, _, _, sockaddr in answers]


class Fetcher:
    """Fetches pictures under one policy; share one instance, it bounds connections and keeps none idle."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._pool: httpcore2.AsyncConnectionPool | None = None
        if policy.hosts:
            self._pool = httpcore2.AsyncConnectionPool(
                ssl_context=ssl.create_default_context(),
                max_connections=policy.max_connections,
                max_keepalive_connections=0,
                network_backend=GuardedBackend(policy),
            )

    async def close(self) -> None:
        """Closes what is open."""
        if self._pool is not None:
            await self._pool.aclose()

    async def fetch(self, url: str, field: str, spend: Callable[[int], None]) -> bytes:
        """Body of `url`, at most `max_bytes` long; `field` names the image in errors.

        `spend` is told the size of each piece as it comes in and may raise: the request's own budget.

        Raises InvalidArgument (refused or answered with an error), ResourceExhausted (too long), Unavailable (the host
        cannot be reached, is too slow, or failed).
        """
        try:
            async with asyncio.timeout(self._policy.timeout_seconds):
                return await self._follow(url, field, spend)
        except TimeoutError as error:
            limit = self._policy.timeout_seconds
            message = f"{field}: the host did not answer in full within {limit:g} seconds"
            raise Unavailable(message, field=field, limit=limit, reason="FETCH_TIMEOUT") from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as error:
            message = f"{field}: the host could not be reached or broke off ({type(error).__name__})"
            raise Unavailable(message, field=field, reason="FETCH_FAILED") from error

    async def _follow(self, url: str, field: str, spend: Callable[[int], None]) -> bytes:
        for _ in range(self._policy.max_redirects + 1):
            body, location = await self._hop(url, field, spend)
            if location is None:
                return body
            url = urljoin(url, location)
        limit = self._policy.max_redirects
        raise InvalidArgument(
            f"{field}: more than {limit} redirects", field=field, limit=limit, reason="FETCH_REDIRECTS"
        )

    async def _hop(self, url: str, field: str, spend: Callable[[int], None]) -> tuple[bytes, str | None]:
        """One request: the body, or where the host redirects to."""
        parsed, port = self._check(url, field)
        assert self._pool is not None, "an allowed host implies a pool"
        host = parsed.hostname or ""
        target = (parsed.path or "/") + (f"?{parsed.query}" if parsed.query else "")
        default_port = port == _DEFAULT_PORTS[parsed.scheme]
        headers: dict[bytes | str, bytes | str] = {
            # The literal form of an IPv6 host needs its brackets back; a default port is left out, as browsers do.
            "Host": address_text(host, port).rpartition(":")[0] if default_port else address_text(host, port),
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "User-Agent": "day0",
        }
        location = httpcore2.URL(scheme=parsed.scheme, host=host, port=port, target=target)
        try:
            async with self._pool.stream("GET", location, headers=headers) as response:
                return await self._read(response, field, spend)
        except AddressRefused as error:
            message = f"{field}: host {host!r} resolves to no address that may be connected to"
            raise InvalidArgument(message, field=field, value=host, reason="FETCH_ADDRESS_REFUSED") from error

    async def _read(
        self, response: httpcore2.Response, field: str, spend: Callable[[int], None]
    ) -> tuple[bytes, str | None]:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and "location" in headers:
            return b"", headers["location"]
        if response.status != 200:
            failure: type[ServiceError] = Unavailable if response.status >= 500 else InvalidArgument
            message = f"{field}: the host answered with HTTP status {response.status}"
            raise failure(message, field=field, value=response.status, reason="FETCH_STATUS")
        if headers.get("content-encoding", "identity").lower() != "identity":
            # Unpacking would need a limit of its own; we asked for none.
            message = f"{field}: the host answered with content encoding {headers['content-encoding']!r}"
            raise InvalidArgument(message, field=field, reason="FETCH_ENCODING")
        limit = self._policy.max_bytes
        body = bytearray()
        async for chunk in response.aiter_stream():
            body += chunk
            spend(len(chunk))
            if len(body) > limit:
                message = f"{field}: the picture behind the URL is longer than max_image_bytes {limit}"
                raise ResourceExhausted(message, field=field, limit=limit, value=len(body), reason="IMAGE_BYTES")
        return bytes(body), None

    def _check(self, url: str, field: str) -> tuple[SplitResult, int]:
        """The parsed URL and its port, or InvalidArgument. Messages never quote the path: it may be secret."""
        try:
            parsed = urlsplit(url)
            host, explicit_port = parsed.hostname or "", parsed.port
        except ValueError as error:
            raise InvalidArgument(f"{field}: malformed URL", field=field, reason="FETCH_URL") from error
        if parsed.scheme not in _DEFAULT_PORTS:
            message = f"{field}: URL scheme {parsed.scheme!r} is not one of data, http, https"
            raise InvalidArgument(message, field=field, value=parsed.scheme, reason="FETCH_SCHEME")
        if not self._policy.hosts:
            message = f"{field}: fetching URLs is switched off (setting fetch_allowed_hosts); send bytes or a data: URL"
            raise InvalidArgument(message, field=field, value=host, reason="FETCH_OFF")
        if not host or not url.isascii() or "@" in parsed.netloc or any(character <= " " for character in url):
            message = f"{field}: a URL must be plain ASCII with a host and without user information"
            raise InvalidArgument(message, field=field, reason="FETCH_URL")
        port = explicit_port if explicit_port is not None else _DEFAULT_PORTS[parsed.scheme]
        if not self._policy.allows_host(host, port):
            message = f"{field}: host {address_text(host, port)!r} is not on the list fetch_allowed_hosts"
            raise InvalidArgument(message, field=field, value=host, reason="FETCH_HOST_REFUSED")
        return parsed, port
