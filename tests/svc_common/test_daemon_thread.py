"""Blocking work is awaited, and left behind when nobody wants it any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from svc_common.daemon_thread import run_in_daemon_thread
from svc_common.logs import current_request_id


async def test_result_exception_and_context() -> None:
    current_request_id.set("abc")
    assert await run_in_daemon_thread(current_request_id.get, name="work") == "abc"

    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        await run_in_daemon_thread(fail, name="work")


async def test_cancel_does_not_wait_for_the_thread() -> None:
    started, go_on = threading.Event(), threading.Event()
    seen: list[threading.Thread] = []

    def block() -> None:
        seen.append(threading.current_thread())
        started.set()
        go_on.wait(60)

    task = asyncio.create_task(run_in_daemon_thread(block, name="work"))
    while not started.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen[0].is_alive() and seen[0].daemon
    go_on.set()
    seen[0].join(10)
    # The late result reaches a future nobody waits for.
    await asyncio.sleep(0)
