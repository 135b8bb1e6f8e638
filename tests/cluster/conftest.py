"""Fixtures of the cluster's tests: any cluster by --kubeconfig, a namespace, the bucket and a running release."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from day0.embedded import embedded_model
from tests.cluster import release
from tests.cluster.bucket import Bucket
from tests.cluster.cluster import Cluster, CommandFailed

CACHE = Path.home() / ".cache" / "day0" / "cluster"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What cluster it is, and where it has the images from."""
    group = parser.getgroup("cluster")
    group.addoption("--kubeconfig", type=Path, help="cluster to use; `make test-cluster` starts one")
    group.addoption(
        "--registry", default="localhost", help="where the cluster finds day0-router, -vision, -llm, -bucket"
    )
    group.addoption("--tag", default="test", help="tag of the images")
    group.addoption("--probes", default="exec", choices=["exec", "grpc"], help="grpc from Kubernetes 1.24 on")
    group.addoption("--binaries", type=Path, default=CACHE / "bin", help="folder of helm 4 and kubectl")


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster, with a namespace of this run that goes when the run ends."""
    kubeconfig = request.config.getoption("kubeconfig", None)
    if kubeconfig is None:
        pytest.fail("no cluster: run `make test-cluster`, or give --kubeconfig FILE", pytrace=False)
    binaries = request.config.getoption("binaries")
    namespace = f"day0-test-{uuid.uuid4().hex[:8]}"
    found = Cluster(kubeconfig.resolve(), namespace, binaries / "kubectl", binaries / "helm")
    found.kubectl("create", "namespace", namespace)
    yield found
    if request.session.testsfailed:
        print(_state(found))
    found.kubectl("delete", "namespace", namespace, "--timeout", "150s", timeout_seconds=160)


@pytest.fixture(scope="session")
def bucket(cluster: Cluster, request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket in the cluster."""
    made = Bucket(cluster, "models")
    made.start(f"{request.config.getoption('registry')}/day0-bucket:{request.config.getoption('tag')}")
    return made


@pytest.fixture(scope="session")
def model_uri(bucket: Bucket) -> str:
    """The embedded model, in the bucket with its manifest."""
    return bucket.put_folder(embedded_model(), "day0-demo")


@pytest.fixture(scope="session")
def values(bucket: Bucket, model_uri: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Values of the release; a test that changes them works on a copy."""
    names = ("registry", "tag", "probes")
    return release.values(bucket, model_uri, **{name: request.config.getoption(name) for name in names})


@pytest.fixture
def installed(cluster: Cluster, values: dict[str, Any], tmp_path: Path) -> str:
    """Name of the release, installed and ready with `values`, whatever an earlier test left."""
    release.install(cluster, tmp_path, values)
    return release.RELEASE


def _state(cluster: Cluster) -> str:
    """What helps to see why a test failed."""
    texts = []
    for arguments in (
        ["get", "pods", "--output", "wide"],
        ["get", "events", "--sort-by", ".lastTimestamp"],
        ["describe", "pods"],
    ):
        try:
            texts.append(cluster.kubectl(*arguments)[-8000:])
        except CommandFailed as error:
            texts.append(str(error))
    return "\n".join(texts)
