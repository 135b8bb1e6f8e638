"""Batches stay within the patch budget, keep their order, drop who left, and the line always moves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import torch

from svc_common.errors import Internal, ResourceExhausted, Unavailable
from svc_common.health import StepAge
from vision_svc.batcher import Batcher
from vision_svc.encoder import EncodeError, VisualTokens
from vision_svc.processor import Patches


def image(patches: int) -> Patches:
    return Patches(torch.zeros(patches, 1), 1, patches)


class Recorder:
    """Stands in for the tower: notes the batches, and can be held still."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = threading.Event()
        self.open.set()
        self.started = threading.Event()
        self.raises: Exception | None = None

    def __call__(self, images: Sequence[Patches]) -> list[VisualTokens | EncodeError]:
        self.batches.append([each.count for each in images])
        self.started.set()
        assert self.open.wait(10)
        if self.raises is not None:
            raise self.raises
        return [
            EncodeError("13 is broken") if each.count == 13 else VisualTokens(b"", each.count, 1, 1, each.count, b"")
            for each in images
        ]


@asynccontextmanager
async def serving(
    recorder: Recorder, *, budget: int = 100, wait_ms: float = 0, max_waiting: int = 1000, age: StepAge | None = None
) -> AsyncIterator[Batcher]:
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher(
            recorder,
            executor,
            patch_budget=budget,
            max_waiting_patches=max_waiting,
            batch_wait_ms=wait_ms,
            step_age=age or StepAge(),
            observe_encode_seconds=lambda seconds: None,
            observe_queue_seconds=lambda seconds: None,
        )
        loop = asyncio.create_task(batcher.run())
        try:
            yield batcher
        finally:
            recorder.open.set()
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)


async def submit(batcher: Batcher, *counts: int) -> list[asyncio.Task[VisualTokens]]:
    """Tasks that stand in the line, in this order."""
    tasks = [asyncio.create_task(batcher.encode(image(count), time.monotonic())) for count in counts]
    await asyncio.sleep(0)
    return tasks


async def hold(batcher: Batcher, recorder: Recorder) -> asyncio.Task[VisualTokens]:
    """One image of one patch whose batch runs until `recorder.open` is set."""
    recorder.open.clear()
    recorder.started.clear()
    (task,) = await submit(batcher, 1)
    await asyncio.to_thread(recorder.started.wait, 10)
    return task


async def test_groups_under_the_budget_in_order() -> None:
    recorder = Recorder()
    async with serving(recorder) as batcher:
        first = await hold(batcher, recorder)
        tasks = await submit(batcher, 40, 60, 1, 100, 30, 30, 50)
        recorder.open.set()
        results = await asyncio.gather(first, *tasks)
    assert recorder.batches == [[1], [40, 60], [1], [100], [30, 30], [50]]
    assert [result.tokens for result in results] == [1, 40, 60, 1, 100, 30, 30, 50]


async def test_waits_a_little_for_company() -> None:
    recorder = Recorder()
    async with serving(recorder, wait_ms=5000) as batcher:
        async with asyncio.timeout(4):
            await asyncio.gather(*await submit(batcher, 10, 20, 70))
    assert recorder.batches == [[10, 20, 70]], "a full budget does not wait any longer"


async def test_the_wait_ends() -> None:
    recorder = Recorder()
    async with serving(recorder, wait_ms=20) as batcher:
        started = time.monotonic()
        await asyncio.gather(*await submit(batcher, 10))
        assert time.monotonic() - started >= 0.02
    assert recorder.batches == [[10]]


# Case 17.
async def test_image_above_the_budget_is_refused_and_the_line_moves_on() -> None:
    recorder = Recorder()
    async with serving(recorder) as batcher, asyncio.timeout(5):
        with pytest.raises(ResourceExhausted, match="101 patches, patch_budget is 100") as caught:
            await batcher.encode(image(101), time.monotonic())
        assert (caught.value.limit, caught.value.value) == (100, 101)
        assert (await batcher.encode(image(100), time.monotonic())).tokens == 100
        assert batcher.waiting_images == batcher.waiting_patches == 0


# Case 17: budget one image, send two.
async def test_budget_of_one_image_takes_two_in_turn() -> None:
    recorder = Recorder()
    async with serving(recorder, budget=16) as batcher, asyncio.timeout(5):
        await asyncio.gather(*await submit(batcher, 16, 16))
    assert recorder.batches == [[16], [16]]


async def test_who_leaves_is_dropped_at_once() -> None:
    recorder = Recorder()
    async with serving(recorder) as batcher:
        first = await hold(batcher, recorder)
        stays, leaves, last = await submit(batcher, 20, 30, 40)
        assert (batcher.waiting_images, batcher.waiting_patches, batcher.running_images) == (3, 90, 1)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        assert (batcher.waiting_images, batcher.waiting_patches) == (2, 60)
        recorder.open.set()
        await asyncio.gather(first, stays, last)
        assert (batcher.waiting_images, batcher.waiting_patches, batcher.running_images) == (0, 0, 0)
    assert recorder.batches == [[1], [20, 40]]


async def test_who_leaves_a_running_batch_harms_nobody() -> None:
    recorder = Recorder()
    async with serving(recorder, wait_ms=1000, budget=2) as batcher:
        recorder.open.clear()
        stays, leaves = await submit(batcher, 1, 1)
        await asyncio.to_thread(recorder.started.wait, 10)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        recorder.open.set()
        assert (await stays).tokens == 1
        assert (await batcher.encode(image(2), time.monotonic())).tokens == 2


async def test_room_closes_and_opens() -> None:
    recorder = Recorder()
    async with serving(recorder, max_waiting=50) as batcher:
        first = await hold(batcher, recorder)
        tasks = await submit(batcher, 50)
        room = asyncio.create_task(batcher.room())
        await asyncio.sleep(0)
        assert not room.done()
        recorder.open.set()
        await asyncio.gather(first, *tasks, room)


async def test_broken_image_fails_alone() -> None:
    recorder = Recorder()
    async with serving(recorder, wait_ms=1000, budget=23) as batcher:
        good, bad = await submit(batcher, 10, 13)
        assert (await good).tokens == 10
        with pytest.raises(Internal, match="13 is broken"):
            await bad


async def test_failed_batch_does_not_stop_the_line() -> None:
    recorder = Recorder()
    async with serving(recorder) as batcher:
        recorder.raises = RuntimeError("the tower fell")
        with pytest.raises(RuntimeError, match="the tower fell"):
            await batcher.encode(image(5), time.monotonic())
        recorder.raises = None
        assert (await batcher.encode(image(5), time.monotonic())).tokens == 5


async def test_wrong_number_of_results_fails_the_batch_only() -> None:
    recorder = Recorder()
    async with serving(recorder) as batcher:
        batcher._encode_batch = lambda images: []
        with pytest.raises(AssertionError):
            await batcher.encode(image(5), time.monotonic())
        batcher._encode_batch = recorder
        assert (await batcher.encode(image(5), time.monotonic())).tokens == 5


async def test_end_of_the_loop_is_told_to_all() -> None:
    recorder = Recorder()
    async with serving(recorder) as batcher:
        runs = await hold(batcher, recorder)
        (waits,) = await submit(batcher, 5)
    async with asyncio.timeout(5):
        for task in (runs, waits, asyncio.create_task(batcher.encode(image(1), time.monotonic()))):
            with pytest.raises(Unavailable, match="the encoder has stopped"):
                await task
    assert batcher.waiting_images == batcher.waiting_patches == 0


async def test_step_age_grows_only_while_work_waits() -> None:
    recorder, age = Recorder(), StepAge()
    async with serving(recorder, age=age) as batcher:
        assert age.age_seconds() == 0
        first = await hold(batcher, recorder)
        before = age.age_seconds()
        assert age.age_seconds() > before
        recorder.open.set()
        await first
        await batcher.encode(image(1), time.monotonic())
        while batcher.running_images:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert age.age_seconds() == 0
