"""How far a service is on its way to ready: stage, bytes of weights, their rate, time left; knows no weights."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from protos.common.v1 import common_pb2
from svc_common.errors import Unavailable
from svc_common.logs import get_logger

_log = get_logger("day0.startup")

STAGES = ("resolve", "manifest", "load", "verify", "warm_up", "ready", "failed")
"""In order. `resolve` finds and lists the checkpoint; `manifest` reads manifest, small files, index and headers;
`load` reads weights and checks each tensor's digest while later ones come; `verify`, after the last byte, checks the
digests that are left and that every parameter was written; `warm_up` runs a forward; `failed` comes after any but
`ready`."""

RATE_WINDOW_SECONDS = 5.0
_SAMPLE_SECONDS = 0.1
# A rate over less would only say how large a piece is.
_MIN_SPAN_SECONDS = 0.2


class StartupStopped(Exception):
    """The service was told to end while it was reading; the message has the bytes it had read."""


class Startup:
    """One start of one service. Thread safe: the loading thread tells it, the ports read it.

    `show_bytes` is the `Progress` of a weight stream. It leads from `manifest` to `load` when it is first called, and
    from there to `verify` when all bytes are there; every other stage is entered by `enter`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._stage = STAGES[0]
        self._failed_in = ""
        self._stopped = False
        self._loaded_bytes = 0
        self._expected_bytes = 0
        self._samples: deque[tuple[float, int]] = deque()

    @property
    def stage(self) -> str:
        """One of STAGES."""
        return self._stage

    def enter(self, stage: str) -> None:
        """Goes on to a later stage; the one it is in already is no change."""
        with self._lock:
            self._enter(stage)

    def fail(self) -> None:
        """The start has ended in an error."""
        with self._lock:
            self._failed_in = self._stage
            self._enter("failed")

    def stop(self) -> None:
        """From now on `show_bytes` raises StartupStopped, which ends the reading."""
        self._stopped = True

    def show_bytes(self, loaded_bytes: int, expected_bytes: int) -> None:
        """Bytes of weights read so far and to be read in all; raises StartupStopped."""
        if self._stopped:
            raise StartupStopped(f"the service was stopped after {loaded_bytes} of {expected_bytes} bytes of weights")
        with self._lock:
            self._loaded_bytes, self._expected_bytes = loaded_bytes, expected_bytes
            if STAGES.index(self._stage) < STAGES.index("load"):
                self._enter("load")
            now = self._clock()
            if not self._samples or now - self._samples[-1][0] >= _SAMPLE_SECONDS:
                self._samples.append((now, loaded_bytes))
                self._forget_old(now)
            if loaded_bytes >= expected_bytes:
                self._enter("verify")

    def snapshot(self) -> common_pb2.StartupProgress:
        """All there is to tell, as it is now. After the last byte no seconds are left; before a rate, none are told."""
        with self._lock:
            now = self._clock()
            rate = self._rate(now)
            progress = common_pb2.StartupProgress(
                stage=self._stage,
                loaded_bytes=self._loaded_bytes,
                expected_bytes=self._expected_bytes,
                bytes_per_second=rate,
                elapsed_seconds=now - self._began,
            )
            if self._stage in ("verify", "warm_up", "ready"):
                progress.seconds_left = 0.0
            elif rate > 0:
                progress.seconds_left = (self._expected_bytes - self._loaded_bytes) / rate
            return progress

    def unavailable(self, what: str) -> Unavailable:
        """The answer to a call that came too early, with the stage and the share of bytes that are there."""
        progress = self.snapshot()
        if progress.stage == "failed":
            return Unavailable(f"{what} could not start: it failed in stage {self._failed_in}", reason="START_FAILED")
        share = ""
        if progress.expected_bytes:
            percent = 100 * progress.loaded_bytes // progress.expected_bytes
            share = f", {percent} % of {progress.expected_bytes} bytes"
        return Unavailable(f"{what} is starting: stage {progress.stage}{share}", reason="LOADING")

    def _enter(self, stage: str) -> None:
        if stage == self._stage:
            return
        assert self._stage not in ("ready", "failed"), f"{stage} after {self._stage}"
        assert STAGES.index(stage) > STAGES.index(self._stage), f"{stage} after {self._stage}"
        self._stage = stage
        elapsed_seconds = round(self._clock() - self._began, 3)
        _log.info(
            "startup stage: %s", stage, extra={"elapsed_seconds": elapsed_seconds, "loaded_bytes": self._loaded_bytes}
        )

    def _forget_old(self, now: float) -> None:
        """Keeps the samples of the window and the one before it."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_WINDOW_SECONDS:
            self._samples.popleft()

    def _rate(self, now: float) -> float:
        """Bytes a second of the last seconds, a standstill up to now included."""
        if self._stage != "load" or not self._samples:
            return 0.0
        self._forget_old(now)
        then, bytes_then = self._samples[0]
        span_seconds = now - then
        return (self._loaded_bytes - bytes_then) / span_seconds if span_seconds >= _MIN_SPAN_SECONDS else 0.0
