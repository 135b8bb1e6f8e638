"""Groups waiting images into batches under a patch budget and runs them one batch at a time; knows no image bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from svc_common.errors import Internal, ResourceExhausted, Unavailable
from svc_common.health import StepAge
from vision_svc.encoder import EncodeError, VisualTokens
from vision_svc.processor import Patches

EncodeBatch = Callable[[Sequence[Patches]], list[VisualTokens | EncodeError]]


@dataclass(eq=False, slots=True)
class _Waiting:
    patches: Patches
    result: asyncio.Future[VisualTokens]
    arrived: float
    in_line_since: float = field(default_factory=time.monotonic)


class Batcher:
    """First come, first served; images leave the line together as long as the patch budget holds them.

    `encode_batch` runs on one thread of its own: batches never overlap and the event loop never waits for arithmetic.
    Everything else lives on the event loop.
    """

    def __init__(
        self,
        encode_batch: EncodeBatch,
        executor: ThreadPoolExecutor,
        *,
        patch_budget: int,
        max_waiting_patches: int,
        batch_wait_ms: float,
        step_age: StepAge,
        observe_encode_seconds: Callable[[float], None],
        observe_queue_seconds: Callable[[float], None],
    ) -> None:
        """The observers are told the duration of every batch, and each image's time from its arrival to its batch."""
        assert patch_budget > 0 and max_waiting_patches > 0
        self._encode_batch = encode_batch
        self._executor = executor
        self._patch_budget = patch_budget
        self._max_waiting_patches = max_waiting_patches
        self._batch_wait_seconds = batch_wait_ms / 1000
        self._step_age = step_age
        self._observe_encode_seconds = observe_encode_seconds
        self._observe_queue_seconds = observe_queue_seconds
        self._line: deque[_Waiting] = deque()
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._waiting_patches = 0
        self._running_images = 0
        self._ended = False

    @property
    def waiting_images(self) -> int:
        """Images in the line."""
        return len(self._line)

    @property
    def waiting_patches(self) -> int:
        """Patches in the line."""
        return self._waiting_patches

    @property
    def running_images(self) -> int:
        """Images of the batch that runs now."""
        return self._running_images

    def check_fits(self, patch_count: int) -> None:
        """Raises ResourceExhausted for an image that no batch can ever hold."""
        if patch_count > self._patch_budget:
            raise ResourceExhausted(
                f"it has {patch_count} patches, patch_budget is {self._patch_budget}",
                field="data",
                limit=self._patch_budget,
                value=patch_count,
                reason="IMAGE_ABOVE_PATCH_BUDGET",
            )

    async def room(self) -> None:
        """Returns when the line is short enough to prepare another image; bounds the memory of prepared pixels."""
        await self._room.wait()

    async def encode(self, patches: Patches, arrived: float) -> VisualTokens:
        """Waits in line and returns the image's tokens; cancelling takes it out of the line at once.

        `arrived` is when the request came, in seconds of the monotonic clock. Raises ResourceExhausted for an image
        above the budget, Internal where the tower gave no usable numbers, Unavailable once `run` has ended.
        """
        self.check_fits(patches.count)
        if self._ended:
            raise _ended()
        waiting = _Waiting(patches, asyncio.get_running_loop().create_future(), arrived)
        self._line.append(waiting)
        self._resize_line(patches.count)
        self._step_age.begin_waiting()
        self._arrival.set()
        try:
            return await waiting.result
        finally:
            if waiting in self._line:
                self._line.remove(waiting)
                self._resize_line(-patches.count)
                self._settle()

    async def run(self) -> None:
        """Serves the line until cancelled; whoever waits then is told so."""
        try:
            while True:
                batch = await self._next_batch()
                if batch:
                    await self._run_batch(batch)
                    self._step_age.step()
                self._settle()
        finally:
            self._ended = True
            _fail(self._line, _ended())

    async def _next_batch(self) -> list[_Waiting]:
        """Waits for a first image, then a little for company, and takes what the budget holds."""
        while not self._line:
            self._arrival.clear()
            await self._arrival.wait()
        until = self._line[0].in_line_since + self._batch_wait_seconds
        while self._waiting_patches < self._patch_budget and (left := until - time.monotonic()) > 0:
            self._arrival.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), left)
        batch: list[_Waiting] = []
        patches = 0
        while self._line and patches + self._line[0].patches.count <= self._patch_budget:
            waiting = self._line.popleft()
            patches += waiting.patches.count
            batch.append(waiting)
        assert batch or not self._line, "an image waits that fits no batch"
        self._resize_line(-patches)
        return batch

    async def _run_batch(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        self._running_images = len(batch)
        started = time.monotonic()
        for waiting in batch:
            self._observe_queue_seconds(started - waiting.arrived)
        try:
            results = await loop.run_in_executor(
                self._executor, self._encode_batch, [waiting.patches for waiting in batch]
            )
            assert len(results) == len(batch), (len(results), len(batch))
        except asyncio.CancelledError:
            _fail(batch, _ended())
            raise
        except Exception as error:
            _fail(batch, error)
            return
        finally:
            self._running_images = 0
            self._observe_encode_seconds(time.monotonic() - started)
        for waiting, result in zip(batch, results, strict=True):
            if waiting.result.done():
                continue
            if isinstance(result, EncodeError):
                waiting.result.set_exception(Internal(f"the encoder failed: {result}", reason="ENCODER_NOT_FINITE"))
            else:
                waiting.result.set_result(result)

    def _resize_line(self, patches: int) -> None:
        self._waiting_patches += patches
        assert self._waiting_patches >= 0
        if self._waiting_patches < self._max_waiting_patches:
            self._room.set()
        else:
            self._room.clear()

    def _settle(self) -> None:
        if not self._line and not self._running_images:
            self._step_age.idle()


def _fail(images: Iterable[_Waiting], error: Exception) -> None:
    for waiting in images:
        if not waiting.result.done():
            waiting.result.set_exception(error)


def _ended() -> Unavailable:
    return Unavailable("the encoder has stopped", reason="ENCODER_STOPPED")
