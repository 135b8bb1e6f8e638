"""Settings, health, drain and the process itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.router.v1 import router_pb2, router_pb2_grpc
from router_svc.settings import RouterSettings
from svc_common.settings import SettingsError, read_settings

PREFIX = "DAY0_ROUTER_"
SERVICE = "day0.router.v1.RouterService"


def test_settings_are_read_from_variables():
    settings = read_settings(
        RouterSettings,
        {
            PREFIX + "LLM_TARGETS": "a:1, dns:///b:2",
            PREFIX + "FETCH_ALLOWED_HOSTS": "pictures.test,*.cdn.test",
            PREFIX + "FETCH_ALLOWED_NETWORKS": "10.0.0.0/8",
            PREFIX + "MAX_INFLIGHT_REQUESTS": "7",
        },
    )
    assert settings.llm_targets == ("a:1", "dns:///b:2")
    assert settings.fetch_allowed_hosts == ("pictures.test", "*.cdn.test")
    assert settings.max_inflight_requests == 7


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "DAY0_ROUTER_LLM_TARGETS"),
        ({"LLM_TARGETS": ""}, "DAY0_ROUTER_LLM_TARGETS"),
        ({"LLM_TARGETS": "nonsense"}, "DAY0_ROUTER_LLM_TARGETS.*nonsense"),
        ({"LLM_TARGETS": "a:1,a:1"}, "DAY0_ROUTER_LLM_TARGETS.*twice"),
        ({"LLM_TARGET": "a:1"}, "DAY0_ROUTER_LLM_TARGET"),
        ({"MAX_IMAGES": "0"}, "DAY0_ROUTER_MAX_IMAGES"),
        ({"LOAD_POLL_SECONDS": "nan"}, "DAY0_ROUTER_LOAD_POLL_SECONDS"),
        ({"DEFAULT_DEADLINE_SECONDS": "inf"}, "DAY0_ROUTER_DEFAULT_DEADLINE_SECONDS"),
        ({"DEFAULT_DEADLINE_SECONDS": "5000"}, "max_deadline_seconds"),
        ({"FETCH_ALLOWED_NETWORKS": "10.0.0.1/8"}, "DAY0_ROUTER_FETCH_ALLOWED_NETWORKS.*10.0.0.1/8"),
        ({"FETCH_ALLOWED_HOSTS": "http://a/"}, "DAY0_ROUTER_FETCH_ALLOWED_HOSTS.*http://a/"),
        ({"MAX_IMAGE_BYTES": "100000000"}, "max_total_image_bytes"),
        ({"MAX_TOTAL_IMAGE_BYTES": "67108864"}, "max_message_bytes"),
    ],
)
def test_bad_settings_name_the_variable(variables, named):
    targets = {} if not variables or any("TARGET" in name for name in variables) else {"LLM_TARGETS": "a:1"}
    with pytest.raises(SettingsError, match=named):
        read_settings(RouterSettings, {PREFIX + name: value for name, value in (targets | variables).items()})


async def _health(router, service):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.health.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_readiness_asks_no_language_service(start_router):
    router = await start_router(ready=0, llm_targets=("127.0.0.1:9",))
    assert await _health(router, SERVICE) == health_pb2.HealthCheckResponse.SERVING
    assert await _health(router, "") == health_pb2.HealthCheckResponse.SERVING


async def test_liveness_falls_while_the_event_loop_stands_still(start_router, until):
    router = await start_router(ready=0, llm_targets=("127.0.0.1:9",), liveness_seconds=0.5)
    seen = []

    def look():
        with grpc.insecure_channel(f"127.0.0.1:{router.router.health.port}") as channel:
            for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20):
                seen.append(response.status)
                if response.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return

    thread = threading.Thread(target=look)
    thread.start()
    # Joining on the loop is what stops it.
    thread.join()
    assert seen[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
    await until(lambda: router.router.health.status("") == health_pb2.HealthCheckResponse.SERVING)


async def test_drain_lowers_readiness_first_and_lets_streams_end(start_llm, start_router, chat, until):
    llm = await start_llm()
    gate = asyncio.Event()
    plain = llm.answer

    async def gated(request, context):
        await gate.wait()
        async for event in plain(request, context):
            yield event

    llm.answer = gated
    router = await start_router(llm, drain_seconds=20)
    running = asyncio.create_task(router.text(chat()))
    await until(lambda: llm.open_streams == 1)
    draining = asyncio.create_task(router.router.stop())
    await until(lambda: router.router.server.draining)
    assert await _health(router, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(chat())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    gate.set()
    assert await running == "from a"
    await draining


async def _start_process(environment):
    variables = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)} | environment
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router_svc", env=variables, stderr=asyncio.subprocess.PIPE
    )


async def test_the_process_serves_and_ends_on_sigterm(start_llm, chat):
    llm = await start_llm()
    process = await _start_process(
        {
            PREFIX + "LLM_TARGETS": llm.target,
            PREFIX + "GRPC_PORT": "0",
            PREFIX + "HEALTH_PORT": "0",
            PREFIX + "METRICS_PORT": "0",
            PREFIX + "LOAD_POLL_SECONDS": "0.05",
        }
    )
    try:
        port = None
        async with asyncio.timeout(30):
            while port is None:
                line = (await process.stderr.readline()).decode()
                assert line, "the process ended before it listened"
                found = re.search(r'"grpc_port": (\d+)', line)
                port = found and found.group(1)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = router_pb2_grpc.RouterServiceStub(channel)
                while not (await stub.ListModels(router_pb2.ListModelsRequest())).models:
                    await asyncio.sleep(0.01)
                events = [event async for event in stub.Generate(chat())]
            assert events[1].delta.text == "from a"
            process.send_signal(signal.SIGTERM)
            await process.stderr.read()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("environment", "status", "named"),
    [
        ({}, 2, "DAY0_ROUTER_LLM_TARGETS"),
        ({PREFIX + "LLM_TARGETS": "127.0.0.1:9", PREFIX + "MAX_IMAGE": "1"}, 2, "DAY0_ROUTER_MAX_IMAGE"),
    ],
)
async def test_bad_settings_end_the_process(environment, status, named):
    process = await _start_process(environment)
    _, errors = await process.communicate()
    assert process.returncode == status
    assert named in errors.decode() and "Traceback" not in errors.decode()


async def test_a_taken_port_ends_the_process(start_llm):
    llm = await start_llm()
    process = await _start_process(
        {
            PREFIX + "LLM_TARGETS": llm.target,
            PREFIX + "GRPC_PORT": str(llm.port),
            PREFIX + "HEALTH_PORT": "0",
            PREFIX + "METRICS_PORT": "0",
        }
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert "grpc_port" in errors.decode() and "Traceback" not in errors.decode()


async def test_the_router_loads_no_heavy_library():
    code = (
        "import sys, router_svc.__main__;"
        "print(sorted({'torch', 'transformers', 'numpy', 'PIL'} & {name.split('.')[0] for name in sys.modules}))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().strip() == "[]"
