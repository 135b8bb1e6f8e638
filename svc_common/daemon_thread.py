"""Awaits blocking work on a thread that does not keep the process alive; knows nothing of the work."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T], *, name: str) -> T:
    """The result of `work()`, or its exception.

    Unlike `asyncio.to_thread`, cancelling leaves the thread behind and the interpreter does not wait for it: a service
    told to stop while it reads its weights ends at once. The caller's context variables are visible in `work`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(setter: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            setter(outcome)

    def report(setter: Callable[[Any], None], outcome: Any) -> None:
        # The loop may have closed meanwhile: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, setter, outcome)

    def run() -> None:
        try:
            result = context.run(work)
        except BaseException as exc:
            report(future.set_exception, exc)
        else:
            report(future.set_result, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
