"""Asks grpc.health.v1 once: `python -m svc_common.health_probe`, for clusters without native probes; knows no service.

Exit status: 0 when the answer is SERVING, 1 for any other answer and for none, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.health import SERVING


def probe(host: str, port: int, service: str, timeout_seconds: float) -> str:
    """The name of the status that `service` has (`""` is liveness), or of the gRPC status that came instead."""
    shown = f"[{host}]" if ":" in host else host
    # A proxy of the environment would be asked in place of the neighbour.
    with grpc.insecure_channel(f"{shown}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was answered and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m svc_common.health_probe", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=50052)
    parser.add_argument("--service", default="", help="full proto name; without it liveness")
    parser.add_argument("--timeout-seconds", type=float, default=5.0)
    given = parser.parse_args(arguments)
    status = probe(given.host, given.port, given.service, given.timeout_seconds)
    print(f"{given.service or 'liveness'}: {status}")
    return 0 if status == health_pb2.HealthCheckResponse.ServingStatus.Name(SERVING) else 1


if __name__ == "__main__":
    sys.exit(main())
