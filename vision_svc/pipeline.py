"""Takes image bytes to visual tokens, once per distinct image at a time; knows no gRPC."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from svc_common.errors import ResourceExhausted
from vision_svc.batcher import Batcher
from vision_svc.cache import TokenCache
from vision_svc.decode import DecodeRules, check_bytes, decode
from vision_svc.encoder import VisualTokens
from vision_svc.processor import Patches, PatchProcessor


@dataclass(frozen=True, slots=True)
class Grid:
    """Patch grid of an image before merging."""

    height: int
    width: int


class Encoding:
    """One image on its way; any number of streams may read it."""

    def __init__(self, digest: bytes, *, cached: bool) -> None:
        """`digest` names the tokens; `cached` says that they were held already."""
        loop = asyncio.get_running_loop()
        self.digest = digest
        self.cached = cached
        self._grid: asyncio.Future[Grid] = loop.create_future()
        self._tokens: asyncio.Future[VisualTokens] = loop.create_future()
        self._readers = 0
        self._task: asyncio.Task[None] | None = None

    async def grid(self) -> Grid:
        """The grid, known as soon as the picture is decoded."""
        return await asyncio.shield(self._grid)

    async def tokens(self) -> VisualTokens:
        """The visual tokens."""
        return await asyncio.shield(self._tokens)

    def _finish(self, tokens: VisualTokens) -> None:
        if not self._grid.done():
            self._grid.set_result(Grid(tokens.grid_height, tokens.grid_width))
        self._tokens.set_result(tokens)

    def _fail(self, error: BaseException) -> None:
        for future in (self._grid, self._tokens):
            if not future.done():
                future.set_exception(error)
                # A reader that left, or that met the error at the first future, never asks the second.
                future.exception()


class Pipeline:
    """Cache, then one decode and one place in the batcher's line for all streams that want the same image."""

    def __init__(
        self,
        *,
        rules: DecodeRules,
        processor: PatchProcessor,
        batcher: Batcher,
        cache: TokenCache,
        fingerprint: bytes,
        decode_threads: int,
        max_waiting_images: int,
        max_waiting_bytes: int,
    ) -> None:
        """`fingerprint` stands for everything but the bytes and the decode rules that decides the tokens."""
        self._rules = rules
        self._processor = processor
        self.batcher = batcher
        self.cache = cache
        settings = json.dumps(asdict(rules), sort_keys=True)
        self._fingerprint = hashlib.sha256(settings.encode() + processor.fingerprint + fingerprint).digest()
        self._decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        self._decode_slots = asyncio.Semaphore(decode_threads)
        self._max_waiting_images = max_waiting_images
        self._max_waiting_bytes = max_waiting_bytes
        self._in_flight: dict[bytes, Encoding] = {}
        self._held_bytes = 0
        self._before_line = 0

    @property
    def waiting_images(self) -> int:
        """Distinct images not yet in a batch, those still to be decoded included."""
        return self._before_line + self.batcher.waiting_images

    @property
    def in_flight(self) -> int:
        """Distinct images being worked on."""
        return len(self._in_flight)

    async def digest(self, data: bytes) -> bytes:
        """sha256 over everything that decides the tokens of `data`; equal digests mean equal tokens."""

        def compute() -> bytes:
            running = hashlib.sha256(self._fingerprint)
            running.update(data)
            return running.digest()

        return await asyncio.to_thread(compute)

    @asynccontextmanager
    async def open(self, data: bytes) -> AsyncIterator[Encoding]:
        """Joins or starts the encoding of `data`; the work stops when the last reader leaves.

        Raises ResourceExhausted for too many bytes and for a full queue. Errors of the image itself come from
        `Encoding.grid` and `Encoding.tokens`.
        """
        check_bytes(len(data), self._rules)
        digest = await self.digest(data)
        held = self.cache.get(digest)
        if held is not None:
            encoding = Encoding(digest, cached=True)
            encoding._finish(held)
            yield encoding
            return
        encoding = self._in_flight.get(digest) or self._start(digest, data)
        encoding._readers += 1
        try:
            yield encoding
        finally:
            encoding._readers -= 1
            if encoding._readers == 0 and encoding._task is not None and not encoding._task.done():
                self._in_flight.pop(digest, None)
                encoding._task.cancel()

    def close(self) -> None:
        """Lets the decode threads end."""
        self._decoders.shutdown(wait=False, cancel_futures=True)

    def _start(self, digest: bytes, data: bytes) -> Encoding:
        if len(self._in_flight) >= self._max_waiting_images:
            raise _queue_full("max_waiting_images", self._max_waiting_images, len(self._in_flight) + 1)
        if self._held_bytes + len(data) > self._max_waiting_bytes:
            raise _queue_full("max_waiting_bytes", self._max_waiting_bytes, self._held_bytes + len(data))
        encoding = Encoding(digest, cached=False)
        self._in_flight[digest] = encoding
        self._held_bytes += len(data)
        # The work may serve several calls: it carries neither the first one's request id nor its deadline.
        encoding._task = asyncio.create_task(self._work(encoding, data), context=contextvars.Context())

        def forget(_task: asyncio.Task[None]) -> None:
            self._held_bytes -= len(data)
            if self._in_flight.get(digest) is encoding:
                del self._in_flight[digest]

        encoding._task.add_done_callback(forget)
        return encoding

    async def _work(self, encoding: Encoding, data: bytes) -> None:
        arrived = time.monotonic()
        try:
            patches = await self._prepare(data)
            encoding._grid.set_result(Grid(patches.grid_height, patches.grid_width))
            tokens = await self.batcher.encode(patches, arrived)
        except Exception as error:
            encoding._fail(error)
        else:
            self.cache.put(encoding.digest, tokens)
            encoding._finish(tokens)

    async def _prepare(self, data: bytes) -> Patches:
        self._before_line += 1
        try:
            async with self._decode_slots:
                await self.batcher.room()
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._decoders, self._decode_and_cut, data)
        finally:
            self._before_line -= 1

    def _decode_and_cut(self, data: bytes) -> Patches:
        image = decode(data, self._rules)
        expected = self._processor.patch_count(image)
        self.batcher.check_fits(expected)
        patches = self._processor(image)
        assert patches.count == expected, (patches.count, expected)
        return patches


def _queue_full(setting: str, limit: int, value: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"the queue is full: {setting} is {limit}, this image would make it {value}",
        field=setting,
        limit=limit,
        value=value,
        reason="QUEUE_FULL",
    )
