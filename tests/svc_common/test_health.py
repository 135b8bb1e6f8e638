"""Readiness waits to be told, liveness is about progress, and neither needs the event loop."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.health import MAX_WATCHERS, Health, StepAge

SERVICE = "day0.llm.v1.LanguageService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
def health() -> Iterator[Health]:
    health = Health()
    health.set_serving(SERVICE, False)
    health.start()
    yield health
    health.stop()


@pytest.fixture
def stub(health: Health) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(f"127.0.0.1:{health.port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)


def _check(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status


def test_not_serving_until_told_and_alive_meanwhile(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    assert _check(stub, SERVICE) == NOT_SERVING
    assert _check(stub, "") == SERVING
    health.set_serving(SERVICE, True)
    assert _check(stub, SERVICE) == SERVING


def test_a_service_nobody_named_is_not_found(stub: health_pb2_grpc.HealthStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _check(stub, "day0.llm.v1.Other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "day0.llm.v1.Other" in caught.value.details()


def test_list_names_all(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    statuses = stub.List(health_pb2.HealthListRequest(), timeout=10).statuses
    assert {name: item.status for name, item in statuses.items()} == {"": SERVING, SERVICE: NOT_SERVING}


def test_watch_sees_each_change(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
    assert next(watch).status == NOT_SERVING
    health.set_serving(SERVICE, True)
    assert next(watch).status == SERVING
    health.start_draining()
    assert next(watch).status == NOT_SERVING


def test_watch_of_an_unknown_service_waits_for_it(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="late"), timeout=20)
    assert next(watch).status == SERVICE_UNKNOWN
    health.set_serving("late", True)
    assert next(watch).status == SERVING


def test_watch_sees_liveness_end_by_time_alone(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    alive = threading.Event()
    alive.set()
    health.set_liveness(alive.is_set)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=20)
    assert next(watch).status == SERVING
    alive.clear()
    assert next(watch).status == NOT_SERVING


def test_watchers_do_not_starve_checks(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30) for _ in range(MAX_WATCHERS)]
    for watch in watches:
        next(watch)
    assert _check(stub, SERVICE) == NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_WATCHERS) in caught.value.details()
    for watch in watches:
        watch.cancel()
    # A watcher that left gives its thread back.
    deadline = time.monotonic() + 20
    while True:
        try:
            assert next(stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)).status == NOT_SERVING
            break
        except grpc.RpcError:
            assert time.monotonic() < deadline, "no watcher was let in after all had left"


def test_draining_is_for_good_but_alive(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    health.set_serving(SERVICE, True)
    health.start_draining()
    health.set_serving(SERVICE, True)
    assert _check(stub, SERVICE) == NOT_SERVING
    assert _check(stub, "") == SERVING


def test_liveness_that_fails_itself_is_not_alive(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    def broken() -> bool:
        raise RuntimeError("no engine")

    health.set_liveness(broken)
    assert _check(stub, "") == NOT_SERVING


def test_stuck_step_fails_liveness(health: Health, stub: health_pb2_grpc.HealthStub) -> None:
    now = [1000.0]
    age = StepAge(clock=lambda: now[0])
    health.set_liveness(lambda: age.alive(300))
    assert _check(stub, "") == SERVING
    now[0] += 10_000
    assert _check(stub, "") == SERVING, "idle is no stall"
    age.begin_waiting()
    now[0] += 300
    assert _check(stub, "") == SERVING
    age.begin_waiting()
    now[0] += 1
    assert _check(stub, "") == NOT_SERVING, "work that goes on arriving hid the stuck step"
    age.step()
    assert _check(stub, "") == SERVING
    now[0] += 301
    assert _check(stub, "") == NOT_SERVING
    age.idle()
    assert (_check(stub, ""), age.age_seconds()) == (SERVING, 0.0)


async def test_health_answers_while_the_event_loop_is_stuck(health: Health) -> None:
    """The check runs on another thread while this coroutine holds the loop."""
    answers: list[int] = []

    def ask() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{health.port}") as channel:
            answers.append(_check(health_pb2_grpc.HealthStub(channel), ""))

    asker = threading.Thread(target=ask)
    asker.start()
    asker.join(20)
    assert answers == [SERVING]


def test_taken_port_is_an_error_that_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"health_port: cannot listen on 127\.0\.0\.1:{port}"):
            Health("127.0.0.1", port).start()


def test_two_processes_never_share_a_health_port(health: Health) -> None:
    second = Health("127.0.0.1", health.port)
    with pytest.raises(OSError, match="health_port"):
        second.start()
