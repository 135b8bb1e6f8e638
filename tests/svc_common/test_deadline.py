"""Time that is left, for a call and for the calls made on its behalf."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from protos.llm.v1 import llm_pb2
from svc_common.deadline import Deadline, remaining_seconds
from svc_common.errors import DeadlineExceeded


def test_child_timeout_is_the_smaller_of_both() -> None:
    assert Deadline.after(None).child_timeout() is None
    assert Deadline.after(None).child_timeout(3) == 3
    assert Deadline.after(60).child_timeout(3) == 3
    left = Deadline.after(3).child_timeout(60)
    assert left is not None and 2 < left <= 3


def test_no_work_is_started_after_the_end() -> None:
    over = Deadline.after(0)
    assert over.expired and over.remaining() == 0.0
    with pytest.raises(DeadlineExceeded):
        over.child_timeout(60)
    assert not Deadline.after(None).expired


async def test_watch_ends_what_waits() -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        async with Deadline.after(0.05).watch():
            await asyncio.Event().wait()
    assert time.monotonic() - started < 5


async def test_watch_lets_other_timeouts_and_results_through() -> None:
    async with Deadline.after(60).watch():
        pass
    async with Deadline.after(None).watch():
        pass
    with pytest.raises(TimeoutError):
        async with Deadline.after(60).watch():
            raise TimeoutError("of something else")
    entered = False
    with pytest.raises(DeadlineExceeded):
        async with Deadline.after(0).watch():
            entered = True
    assert not entered


async def test_remaining_seconds_of_a_call(serve: Any, read_all: Any, text: Any) -> None:
    async def generate(request: Any, context: Any) -> Any:
        left = remaining_seconds(context)
        yield text("none" if left is None else str(9 < left < 11))

    served = await serve(generate)
    assert await read_all(served.stub.Generate(llm_pb2.GenerateRequest())) == "none"
    assert await read_all(served.stub.Generate(llm_pb2.GenerateRequest(), timeout=10)) == "True"
