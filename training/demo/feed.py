"""Worker processes that make batches ahead of training, in a fixed order; knows nothing of the model.

The memory is an anonymous map made before the fork, so that /dev/shm, often small in containers, does not bound it.
"""

from __future__ import annotations

import mmap
import multiprocessing
import queue
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from training.demo.batches import Batch, make_batch
from training.demo.chat import IMAGE_TOKENS
from training.demo.draw import PICTURE_PIXELS
from training.demo.splits import TRAIN

AHEAD_PER_WORKER = 2
# How often a waiting trainer looks whether its workers still live.
CHECK_SECONDS = 5.0


@dataclass(frozen=True)
class Shape:
    """One kind of batch: `rows` rows of `length` tokens with places for `max_images` pictures."""

    length: int
    rows: int
    max_images: int
    mix: Mapping[str, float] | None = None

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each array of the batch."""
        return {
            "ids": ((self.rows, self.length), np.dtype(np.int32)),
            "image_slots": ((self.max_images, IMAGE_TOKENS), np.dtype(np.int32)),
            "task": ((self.rows, self.length), np.dtype(np.int8)),
            "images": ((self.max_images, PICTURE_PIXELS, PICTURE_PIXELS, 3), np.dtype(np.uint8)),
        }

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.fields.values())

    def lay_out(self, memory: memoryview) -> Batch:
        """A batch whose arrays lie in `memory`, one behind the other."""
        arrays, start = {}, 0
        for name, (shape, dtype) in self.fields.items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(memory, dtype=dtype, count=count, offset=start).reshape(shape)
            start += count * dtype.itemsize
        return Batch(**arrays)


class Feed:
    """Batches in the order of their numbers, made `ahead` of their use; a context manager.

    Start it before the process touches an accelerator: the workers are forked. Batch `n` depends on `seed`, `n` and
    its shape only, not on the number of workers.
    """

    def __init__(
        self,
        count: int,
        shapes: Sequence[Shape],
        seed: int = 0,
        first: int = 0,
        split: str = TRAIN,
        ahead: int | None = None,
    ) -> None:
        """Start `count` processes and ask for `ahead` batches (2 a worker unless given) of `shapes[first]`."""
        if count < 1 or not shapes:
            raise ValueError(f"a feed needs a worker and a shape, got {count} workers and {len(shapes)} shapes")
        self._shapes = tuple(shapes)
        self._ahead = ahead or AHEAD_PER_WORKER * count
        slots = self._ahead + 1
        self._slot_bytes = -(-max(shape.nbytes for shape in shapes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = memoryview(mmap.mmap(-1, slots * self._slot_bytes))
        context = multiprocessing.get_context("fork")
        self._requests = context.SimpleQueue()
        self._results = context.Queue()
        self._free = list(range(slots))
        self._used: int | None = None
        self._asked = 0
        self._given = 0
        self._ready: dict[int, tuple[int, int]] = {}
        self._processes = [
            context.Process(target=self._work, args=(seed, split), name=f"batches-{index}", daemon=True)
            for index in range(count)
        ]
        for process in self._processes:
            process.start()
        for _ in range(self._ahead):
            self._ask(first)

    def take(self, next_shape: int) -> tuple[int, Batch]:
        """Ask for one more batch, of `shapes[next_shape]`, and return the oldest one asked for, with its shape's index.

        The arrays are valid until the next call. Raises RuntimeError with the worker's words where one failed or died.
        """
        if self._used is not None:
            self._free.append(self._used)
        self._ask(next_shape)
        while self._given not in self._ready:
            self._receive()
        shape, slot = self._ready.pop(self._given)
        self._given += 1
        self._used = slot
        return shape, self._shapes[shape].lay_out(self._slot(slot))

    def close(self) -> None:
        """End the workers; arrays given out stay readable."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._results.cancel_join_thread()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _slot(self, slot: int) -> memoryview:
        return self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def _ask(self, shape: int) -> None:
        self._requests.put((self._asked, shape, self._free.pop()))
        self._asked += 1

    def _receive(self) -> None:
        try:
            number, shape, slot, failure = self._results.get(timeout=CHECK_SECONDS)
        except queue.Empty:
            dead = [process.name for process in self._processes if not process.is_alive()]
            if dead:
                raise RuntimeError(f"workers ended without a word: {', '.join(dead)}") from None
            return
        if failure:
            raise RuntimeError(f"batch {number} failed in its worker:\n{failure}")
        self._ready[number] = (shape, slot)

    def _work(self, seed: int, split: str) -> None:
        while True:
            number, index, slot = self._requests.get()
            shape = self._shapes[index]
            failure = ""
            try:
                made = make_batch(
                    batch_seed(seed, number), shape.length, shape.rows, shape.max_images, split, shape.mix
                )
                place = shape.lay_out(self._slot(slot))
                for name in shape.fields:
                    getattr(place, name)[...] = getattr(made, name)
            except Exception:
                failure = traceback.format_exc()
            self._results.put((number, index, slot, failure))


def batch_seed(seed: int, number: int) -> int:
    """The seed of a run's batch; runs share none."""
    return (seed << 32) + number


def start_workers(count: int, plan: Sequence[Shape], seed: int = 0, first: int = 0) -> Feed:
    """A running feed of training batches of the shapes in `plan`."""
    return Feed(count, plan, seed, first)
