"""Brings batches to the device through pinned memory; it knows neither what they say nor who makes them.

One thread copies arrays into pinned slots and never calls the driver, so it cannot disturb a graph's capture; the
training thread copies slots to the device and gives each back when its copy is done.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from training.demo.forward import Inputs
from training.demo.schedule import Bucket

DTYPES = {"ids": torch.int32, "task": torch.int8, "images": torch.uint8, "image_slots": torch.int32}
# Copies under way at most: more would let the host run far ahead of the device.
IN_FLIGHT = 2


class ArrayBatch(Protocol):
    """Arrays as in `batches.Batch`; they need to be valid until the next one is asked for."""

    ids: Any
    task: Any
    images: Any
    image_slots: Any


def shapes_of(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Shapes of a batch's arrays."""
    return {
        "ids": (bucket.rows, bucket.length),
        "task": (bucket.rows, bucket.length),
        "images": (bucket.images, 112, 112, 3),
        "image_slots": (bucket.images, 16),
    }


@dataclass(slots=True)
class Slot:
    """One batch in pinned memory, flat; `bucket` says its shape, `copied` is the event after its copy."""

    flat: dict[str, Tensor]
    bucket: Bucket | None = None
    copied: Any = None
    pictures: int = 0

    def view(self, name: str) -> Tensor:
        """The named array in the bucket's shape."""
        assert self.bucket is not None
        shape = shapes_of(self.bucket)[name]
        return self.flat[name][: math.prod(shape)].view(shape)

    def fill(self, batch: ArrayBatch) -> None:
        """Takes over a batch's arrays."""
        rows, length = batch.ids.shape
        self.bucket = Bucket(length, rows, len(batch.images))
        self.pictures = int((batch.image_slots[:, 0] >= 0).sum())
        for name in DTYPES:
            self.view(name).numpy()[...] = getattr(batch, name)


class PinnedFeed:
    """Ready batches, in the order `next_batch` gives them; it is called in the feed's own thread and may wait."""

    def __init__(self, next_batch: Callable[[], ArrayBatch], buckets: tuple[Bucket, ...], *, depth: int = 4) -> None:
        pin = torch.cuda.is_available()
        self.next_batch = next_batch
        self.free: queue.Queue[Slot] = queue.Queue()
        self.ready: queue.Queue[Slot] = queue.Queue()
        self.in_flight: deque[Slot] = deque()
        self.stopped = threading.Event()
        self.failure: BaseException | None = None
        for _ in range(depth):
            flat = {
                name: torch.empty(max(math.prod(shapes_of(b)[name]) for b in buckets), dtype=dtype, pin_memory=pin)
                for name, dtype in DTYPES.items()
            }
            self.free.put(Slot(flat))
        self.thread = threading.Thread(target=self.run, name="pinned-feed", daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Fills free slots until stopped; the first failure ends it and is kept."""
        try:
            while (slot := self.take_free()) is not None:
                slot.fill(self.next_batch())
                self.ready.put(slot)
        except BaseException as error:
            self.failure = error

    def take_free(self) -> Slot | None:
        """A free slot, or None when the feed is stopped."""
        while not self.stopped.is_set():
            try:
                return self.free.get(timeout=0.2)
            except queue.Empty:
                continue
        return None

    def get(self, timeout_seconds: float) -> Slot | None:
        """The next ready slot, or None after the time; raises RuntimeError when the thread has failed."""
        self.reclaim()
        try:
            return self.ready.get(timeout=timeout_seconds)
        except queue.Empty:
            if self.failure is not None:
                raise RuntimeError("the feed has ended") from self.failure
            return None

    def upload(self, slot: Slot, inputs: Inputs) -> None:
        """Starts the copy to static inputs; the slot is free again once it is over."""
        for name in DTYPES:
            getattr(inputs, name).copy_(slot.view(name), non_blocking=True)
        if inputs.ids.device.type != "cuda":
            self.free.put(slot)
            return
        slot.copied = torch.cuda.Event()
        slot.copied.record()
        self.in_flight.append(slot)
        if len(self.in_flight) > IN_FLIGHT:
            self.in_flight[0].copied.synchronize()
        self.reclaim()

    def reclaim(self) -> None:
        """Frees the slots whose copies are over."""
        while self.in_flight and self.in_flight[0].copied.query():
            self.free.put(self.in_flight.popleft())

    def stop(self) -> None:
        """Ends the thread, once what it waits for has come."""
        self.stopped.set()
