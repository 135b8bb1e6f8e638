"""A checkpoint's chat template, rendered in a child process that can be stopped; knows no tokens.

A template is code. jinja2's sandbox keeps it from our objects but not from looping for ever, and a single operation
(a power of large numbers) can hold the interpreter's lock for minutes. So it runs in `template_process.py`, where the
kernel bounds its processor time and memory, and where a slow one does not hold up our threads.
"""

from __future__ import annotations

import json
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

FRAME = struct.Struct("<Q")
PROGRAM = Path(__file__).with_name("template_process.py")
MEMORY_BYTES = 1 << 30
OUTPUT_BYTES = 64 << 20
# Processor time is what is limited; the clock only catches a child that waits for something.
CLOCK_FACTOR = 10
START_SECONDS = 30.0


class TemplateError(Exception):
    """The template did not give a prompt; the message says why."""


class TemplateRefused(TemplateError):
    """The template itself refused the conversation, by calling raise_exception."""


class TemplateTooSlow(TemplateError):
    """Rendering took more processor time than allowed."""


class ChatTemplate:
    """`source` is jinja2; each render may take `limit_seconds` of processor time. Safe to call from several threads.

    `variables` are what the template may name beside the messages (bos_token and so on).
    """

    def __init__(self, source: str, *, limit_seconds: float, variables: dict[str, Any] | None = None) -> None:
        assert limit_seconds > 0
        self.source = source
        self.limit_seconds = limit_seconds
        self._variables = dict(variables or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., ChatTemplate] | None = None

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of `messages` (plain JSON values). Raises TemplateError and its subclasses."""
        with self._lock:
            if self._process is None:
                self._start()
            variables = {**self._variables, "add_generation_prompt": add_generation_prompt}
            answer = self._ask({"messages": messages, "variables": variables}, self.limit_seconds * CLOCK_FACTOR)
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        if "failed" in answer:
            raise TemplateError(f"the chat template failed: {answer['failed']}")
        text = answer["text"]
        assert isinstance(text, str)
        return text

    @property
    def process_id(self) -> int | None:
        """The child process, while there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the child process; a later render starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        # -I: neither the working folder nor PYTHON* variables may decide which code the child imports.
        process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        setup = {
            "template": self.source,
            "cpu_seconds": self.limit_seconds,
            "memory_bytes": MEMORY_BYTES,
            "output_bytes": OUTPUT_BYTES,
        }
        answer = self._ask(setup, START_SECONDS)
        if "failed" in answer:
            self._stop()
            raise TemplateError(f"the chat template does not compile: {answer['failed']}")

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = None
        self._finalizer = None

    def _ask(self, message: dict[str, Any], clock_seconds: float) -> dict[str, Any]:
        assert self._process is not None
        body = json.dumps(message).encode()
        try:
            answer = _exchange(self._process, FRAME.pack(len(body)) + body, clock_seconds)
        except _Ended as ended:
            self._stop()
            if ended.status in (None, -signal.SIGPROF):
                raise TemplateTooSlow(
                    f"the chat template took more than {self.limit_seconds} seconds of processor time"
                ) from None
            raise TemplateError(f"the chat template's process ended with status {ended.status}") from None
        except BaseException:
            # Half an exchange may be left in the pipes: this child cannot be asked again.
            self._stop()
            raise
        answered = json.loads(answer)
        assert isinstance(answered, dict)
        return answered


class _Ended(Exception):
    """The child gave no answer; `status` is its exit status, None while it runs on past the clock's limit."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


def _exchange(process: subprocess.Popen[bytes], message: bytes, clock_seconds: float) -> bytes:
    """Sends one frame and gives the answer's body; raises _Ended."""
    assert process.stdin is not None and process.stdout is not None
    ends_at = time.monotonic() + clock_seconds
    try:
        view = memoryview(message)
        while view:
            view = view[process.stdin.write(view) :]
    except BrokenPipeError:
        raise _Ended(process.wait()) from None
    received = bytearray()
    wanted = FRAME.size
    body_known = False
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN | select.POLLHUP)
    while True:
        left = ends_at - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise _Ended(None)
        piece = process.stdout.read(wanted - len(received))
        if not piece:
            raise _Ended(process.wait())
        received += piece
        if len(received) < wanted:
            continue
        if body_known:
            return bytes(received[FRAME.size :])
        wanted += FRAME.unpack(received)[0]
        body_known = True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()
