"""Follows the EndpointSlices of one Service through the cluster's API; knows no gRPC and no DNS.

It needs `get`, `list` and `watch` of `endpointslices` in the Service's namespace and nothing else. A pod that ends is
left out from the moment its endpoint says `terminating`, before its address is gone; one that is not ready yet is
listed, since whoever follows probes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from svc_common.logs import get_logger
from svc_common.targets import Target, address_text

_log = get_logger(__name__)

GROUP, RESOURCE, SERVICE_LABEL = "discovery.k8s.io", "endpointslices", "kubernetes.io/service-name"
# `v1` since Kubernetes 1.21.
_VERSIONS = ("v1", "v1beta1")
# A watch ends by itself after this, and a thread that shall stop with it.
_WATCH_SECONDS = 30
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS, _RETRY_MAX_SECONDS = 1.0, 30.0
# An account that may not list is asked again: a Role may come after the pod.
_REFUSED_RETRY_SECONDS = 60.0
_REFUSED = (401, 403, 404)
_GONE = 410


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Where the cluster's API is and what proves who asks: files that a pod's service account mounts."""

    url: str
    token_path: Path
    authority_path: Path


class EndpointSlices:
    """Tells `changed` the addresses of a Service whenever they change, and None while the API cannot say.

    `changed` is called from a thread of its own. None means that the account may not list them or that the API was
    never reached; once it answered, a lost connection keeps the last addresses. ModuleNotFoundError where the extra
    `cluster` is not installed.
    """

    def __init__(self, target: Target, access: ClusterAccess, changed: Callable[[frozenset[str] | None], None]) -> None:
        if find_spec("kubernetes") is None:
            raise ModuleNotFoundError(f"target {target.host}: kubernetes is not installed, day0[cluster] brings it")
        self._service, self._namespace = target.host.split(".")
        self._port = target.port
        self._access = access
        self._changed = changed
        self._slices: dict[str, frozenset[str]] = {}
        self._told: frozenset[str] | bool | None = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"endpoints {target.host}", daemon=True)

    def start(self) -> None:
        """Begins; waits for nothing."""
        self._thread.start()

    def stop(self) -> None:
        """Tells nothing from now on; the thread ends with its current watch."""
        self._stopped.set()

    def _tell(self, addresses: frozenset[str] | None) -> None:
        if not self._stopped.is_set() and addresses != self._told:
            self._told = addresses
            self._changed(addresses)

    def _follow(self) -> None:
        # Here and not above: most services that can follow slices are told of none.
        from kubernetes import client

        failures = 0
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._list_and_watch()
                failures = 0
                continue
            except client.ApiException as error:
                if error.status == _GONE:
                    continue
                refused = error.status in _REFUSED
                reason = f"{error.status} {error.reason}"
            # Whatever the server sends: a thread that ends would leave old addresses for good.
            except Exception as error:
                refused, reason = False, f"{type(error).__name__}: {error}"
            failures = 1 if time.monotonic() - began > _WATCH_SECONDS else failures + 1
            where = {"service": self._service, "namespace": self._namespace, "error": reason}
            _log.warning("endpoint slices cannot be read", extra=where)
            if refused or not isinstance(self._told, frozenset):
                self._tell(None)
            wait = min(_RETRY_MAX_SECONDS, _RETRY_SECONDS * 2 ** (failures - 1))
            self._stopped.wait(_REFUSED_RETRY_SECONDS if refused else wait)

    def _list_and_watch(self) -> None:
        from kubernetes import client, watch

        configuration = client.Configuration()
        configuration.host = self._access.url
        configuration.ssl_ca_cert = str(self._access.authority_path) if self._access.url.startswith("https:") else None
        configuration.proxy = None
        self._read_token(configuration)
        with client.ApiClient(configuration) as api_client:
            api = client.CustomObjectsApi(api_client)
            version, listed = self._list(api)
            self._slices = {item["metadata"]["name"]: self._addresses(item) for item in listed["items"]}
            self._tell(frozenset().union(*self._slices.values()))
            from_version = listed["metadata"]["resourceVersion"]
            while not self._stopped.is_set():
                self._read_token(configuration)
                for event in watch.Watch().stream(
                    api.list_namespaced_custom_object,
                    **self._query(version),
                    resource_version=from_version,
                    timeout_seconds=_WATCH_SECONDS,
                    _request_timeout=(_CONNECT_SECONDS, _WATCH_SECONDS + _CONNECT_SECONDS),
                ):
                    item = event["object"]
                    from_version = item["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        self._slices.pop(item["metadata"]["name"], None)
                    elif event["type"] in ("ADDED", "MODIFIED"):
                        self._slices[item["metadata"]["name"]] = self._addresses(item)
                    self._tell(frozenset().union(*self._slices.values()))

    def _read_token(self, configuration: Any) -> None:
        # The kubelet renews it in place.
        token = self._access.token_path.read_text().strip()
        configuration.api_key = {"authorization": f"Bearer {token}"}

    def _query(self, version: str) -> dict[str, Any]:
        return {
            "group": GROUP,
            "version": version,
            "namespace": self._namespace,
            "plural": RESOURCE,
            "label_selector": f"{SERVICE_LABEL}={self._service}",
        }

    def _list(self, api: Any) -> tuple[str, Mapping[str, Any]]:
        """The newest version of the API that the cluster has, and its list."""
        from kubernetes import client

        for version in _VERSIONS:
            try:
                timeout = (_CONNECT_SECONDS, _WATCH_SECONDS)
                return version, api.list_namespaced_custom_object(**self._query(version), _request_timeout=timeout)
            except client.ApiException as error:
                if error.status != 404 or version == _VERSIONS[-1]:
                    raise
        raise AssertionError

    def _addresses(self, item: Mapping[str, Any]) -> frozenset[str]:
        # A slice lists its ports; ours is among them by number, or it is a slice of another set of pods.
        ports = item.get("ports") or []
        if ports and self._port not in [port.get("port") for port in ports]:
            return frozenset()
        return frozenset(
            address_text(address, self._port)
            for endpoint in item.get("endpoints") or []
            if not (endpoint.get("conditions") or {}).get("terminating")
            for address in endpoint["addresses"]
        )
