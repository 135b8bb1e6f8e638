"""A scripted store with a signed checkpoint in it, and the variables by which a service finds it."""

from __future__ import annotations

from pathlib import Path

from svc_common.digests import make_manifest
from svc_common.manifest import write_manifest
from svc_common.object_store import ObjectStore
from tests.s3_double import S3Double


def filled(folder: Path) -> S3Double:
    """Signs the folder and puts its files into a new double."""
    store = ObjectStore(str(folder))
    write_manifest(store, make_manifest(store))
    double = S3Double()
    for file in folder.iterdir():
        double.put(file.name, file.read_bytes())
    return double


def environment_of(double: S3Double, token: str = "") -> dict[str, str]:
    """What every S3 client knows."""
    found = {
        "AWS_ENDPOINT_URL": double.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    return {**found, **({"AWS_SESSION_TOKEN": token} if token else {})}
