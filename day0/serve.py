"""`day0 serve`: runs the planned services until a signal or a failure and tells the terminal; knows no request."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console

from day0.stack import Stack
from day0.startup_display import StartupDisplay


@asynccontextmanager
async def running(stack: Stack, console: Console) -> AsyncIterator[None]:
    """The stack's services started and ready, with a line of progress for each; ended on exit. Raises ServiceFailed."""
    display = StartupDisplay(console, [process.plan.name for process in stack.processes])
    stack.on_state = display.show_state
    stack.on_progress = display.show_progress
    async with stack:
        with display:
            await stack.ready()
        yield


async def serve(stack: Stack, console: Console, *, as_json: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal cuts the drain short.

    Progress goes to `console` (standard error), the endpoints to standard output. Raises ServiceFailed when a service
    ends by itself, before it was ready or later.
    """
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()

    def on_signal() -> None:
        if signalled.is_set():
            stack.hurry()
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    body = asyncio.ensure_future(_until_one_fails(stack, console, as_json=as_json))
    stop = asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait((body, stop), return_when=asyncio.FIRST_COMPLETED)
        if not body.done():
            console.print("stopping: running answers may finish; once more to cut them short", style="dim")
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)
            console.print("stopped", style="dim")
            return
        body.result()
    finally:
        stop.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _until_one_fails(stack: Stack, console: Console, *, as_json: bool) -> None:
    async with running(stack, console):
        out = Console()
        if as_json:
            out.file.write(json.dumps({"event": "ready", "services": endpoints(stack)}) + "\n")
            out.file.flush()
        else:
            out.print(_lines(stack), highlight=False, markup=False, soft_wrap=True)
            out.print(_hint(stack), highlight=False, markup=False, soft_wrap=True)
        raise await stack.failed()


def endpoints(stack: Stack) -> list[dict[str, object]]:
    """Where each service listens, its process and its log."""
    return [
        {
            "service": process.plan.name,
            "target": process.plan.target,
            "health": f"{process.plan.host}:{process.plan.health_port}",
            "metrics": f"http://{process.plan.host}:{process.plan.metrics_port}/metrics",
            "pid": process.pid,
            "log": str(process.log_path),
        }
        for process in stack.processes
    ]


def _lines(stack: Stack) -> str:
    return "\n".join(
        f"{line['service']:<8}gRPC {line['target']}  health {line['health']}  metrics {line['metrics']}  "
        f"pid {line['pid']}\n{'':<8}log {line['log']}"
        for line in endpoints(stack)
    )


def _hint(stack: Stack) -> str:
    target = stack.router_target
    ask = f'Ask:   day0 chat "What is this?" --image photo.jpg --target {target}\n' if target else ""
    return f"\n{ask}Stop:  Ctrl-C"
