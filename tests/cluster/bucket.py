"""The tests' object store inside the cluster: moto's server behind a Service, filled through a forwarded port."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster

NAME, PORT, REGION = "bucket", 5000, "us-east-1"
SECRET = "bucket-credentials"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@dataclass(frozen=True)
class Bucket:
    """A bucket of the store; the services find it by `values`."""

    cluster: Cluster
    name: str

    def start(self, image: str) -> None:
        """Deployment, Service and Secret; returns when the server answers and the bucket exists."""
        labels = {"app": NAME}
        container = {
            "name": NAME,
            "image": image,
            "ports": [{"containerPort": PORT, "protocol": "TCP"}],
            "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        }
        template = {
            "metadata": {"labels": labels},
            "spec": {"enableServiceLinks": False, "terminationGracePeriodSeconds": 1, "containers": [container]},
        }
        self.cluster.apply(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": NAME},
                "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": NAME},
                "spec": {"selector": labels, "ports": [{"port": PORT, "protocol": "TCP"}]},
            },
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": CREDENTIALS},
        )
        self.cluster.kubectl("rollout", "status", f"deployment/{NAME}", "--timeout", "120s")
        with self.cluster.forwarded(f"service/{NAME}", PORT) as address:
            _client(address).create_bucket(Bucket=self.name)

    def put_folder(self, folder: Path, prefix: str) -> str:
        """Every file of the folder under the prefix; the URI that the services take."""
        with self.cluster.forwarded(f"service/{NAME}", PORT) as address:
            client = _client(address)
            for file in sorted(folder.iterdir()):
                client.put_object(Bucket=self.name, Key=f"{prefix}/{file.name}", Body=file.read_bytes())
        return f"s3://{self.name}/{prefix}"

    def flip_byte(self, key: str, offset: int) -> None:
        """One byte of an object is another one from now on."""
        with self.cluster.forwarded(f"service/{NAME}", PORT) as address:
            client = _client(address)
            body = bytearray(client.get_object(Bucket=self.name, Key=key)["Body"].read())
            body[offset] ^= 0xFF
            client.put_object(Bucket=self.name, Key=key, Body=bytes(body))

    def environment(self) -> list[dict[str, str]]:
        """`extraEnv` of vision_svc and llm_svc."""
        endpoint = f"http://{NAME}.{self.cluster.namespace}.svc.cluster.local:{PORT}"
        return [
            {"name": "AWS_ENDPOINT_URL", "value": endpoint},
            {"name": "AWS_ALLOW_HTTP", "value": "true"},
            {"name": "AWS_REGION", "value": REGION},
        ]


def _client(address: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://{address}",
        region_name=REGION,
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
