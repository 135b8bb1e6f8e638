"""One service as a child process: started, watched until ready, ended; knows nothing of the other services."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from day0.plan import ServicePlan
from day0.startup_watch import QUICK_RECONNECT


class ServiceFailed(RuntimeError):
    """A service process ended by itself; the message has its status and its last log lines."""


class ServiceProcess:
    """`python -m <name>_svc` with its output in `log_path`."""

    def __init__(self, plan: ServicePlan, log_folder: Path) -> None:
        self.plan = plan
        self.log_path = log_folder / f"{plan.name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id, once started."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, environ: Mapping[str, str]) -> None:
        """Start it in a session of its own, so that a Ctrl-C reaches it through us alone, in order."""
        assert self._process is None, "started twice"
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"{self.plan.name}_svc",
                env={**environ, **self.plan.variables, "PYTHONUNBUFFERED": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Return when its readiness is SERVING. Raises ServiceFailed when it ends before."""
        watching = asyncio.ensure_future(self._serving())
        ending = asyncio.ensure_future(self.ended())
        try:
            await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise self.failure()
            watching.result()
        finally:
            for task in (watching, ending):
                task.cancel()
            await asyncio.gather(watching, ending, return_exceptions=True)

    async def _serving(self) -> None:
        target = f"{self.plan.host}:{self.plan.health_port}"
        async with grpc.aio.insecure_channel(target, options=QUICK_RECONNECT) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=self.plan.full_name)
            while True:
                with suppress(grpc.aio.AioRpcError):
                    async for answer in stub.Watch(request, wait_for_ready=True):
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                # The stream broke: the process ended, which `ready` sees, or it will be there in a moment.
                await asyncio.sleep(0.1)

    async def ended(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    def failure(self) -> ServiceFailed:
        """The error that tells how it ended."""
        assert self._process is not None and self._process.returncode is not None, "still runs"
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        lines = "\n".join(f"  {line}" for line in self.last_lines()) or "  (it logged nothing)"
        return ServiceFailed(f"the {self.plan.name} service {how}; the end of {self.log_path}:\n{lines}")

    def last_lines(self, count: int = 20) -> list[str]:
        """The end of its log, each line at most 500 characters."""
        with self.log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 65536))
            text = log.read().decode("utf-8", "replace")
        return [line[:500] for line in text.splitlines()[-count:]]

    def terminate(self) -> None:
        """Ask it to drain and end; a second time cuts the drain short."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def stop(self, patience_seconds: float) -> None:
        """End it: SIGTERM, and SIGKILL when it is still there after `patience_seconds`."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), patience_seconds)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
