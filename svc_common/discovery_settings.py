"""Settings of a service that follows the replicas of another one; knows neither service."""

from __future__ import annotations

from pathlib import Path

import pydantic
from pydantic import Field

from svc_common.endpoint_slices import ClusterAccess

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class DiscoverySettings(pydantic.BaseModel):
    """How names and Services among the targets are followed."""

    dns_refresh_seconds: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="How often names among the targets are resolved again."
    )
    kubernetes_api_url: str = Field(
        "https://kubernetes.default.svc", description="The cluster's API, for `kubernetes:///` targets.", min_length=1
    )
    kubernetes_token_path: str = Field(
        f"{_ACCOUNT}/token", min_length=1, description="File with the token that the cluster's API is asked with."
    )
    kubernetes_authority_path: str = Field(
        f"{_ACCOUNT}/ca.crt", min_length=1, description="Certificates that the cluster's API is known by."
    )

    def cluster_access(self) -> ClusterAccess:
        return ClusterAccess(
            self.kubernetes_api_url, Path(self.kubernetes_token_path), Path(self.kubernetes_authority_path)
        )
