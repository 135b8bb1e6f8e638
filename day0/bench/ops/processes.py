"""Processes that run functions one at a time and are replaced when they die or are late; knows no operator."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """A function that can be imported by name, and its arguments; both travel to the process."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a job returned, or why it returned nothing: the exception's text, the exit code, or the time limit.

    `cut` is true where all jobs' time was over, which says nothing about this one.
    """

    value: Any = None
    wrong: str | None = None
    seconds: float = 0.0
    cut: bool = False


def _serve(connection: Connection, usable: Callable[[], None]) -> None:
    """The process's side. After an exception `usable` is asked; where it raises too, this process ends."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            job = connection.recv()
            began = time.monotonic()
            try:
                answer = Answer(job.fn(*job.arguments), None, time.monotonic() - began)
            except Exception as error:  # the asker shows it in the place of the result
                text = " ".join(f"{type(error).__name__}: {error}".split())
                answer = Answer(None, text, time.monotonic() - began)
                try:
                    usable()
                except Exception:
                    connection.send((answer, True))
                    return
            connection.send((answer, False))


class Worker:
    """One spawned process. It is started by the first job and again by the job after its end."""

    def __init__(self, usable: Callable[[], None]) -> None:
        """`usable` raises in a process whose device context is lost; it can be imported by name."""
        self._usable = usable
        self._process: Any = None
        self._connection: Connection | None = None
        self._began = 0.0

    def begin(self, job: Job) -> Connection:
        """Hands over a job without waiting; what is returned becomes readable when there is an answer."""
        if self._process is None or not self._process.is_alive():
            self.stop()
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._usable), daemon=True)
            self._process.start()
            theirs.close()
        assert self._connection is not None
        self._began = time.monotonic()
        self._connection.send(job)
        return self._connection

    def finish(self, seconds: float) -> Answer:
        """The answer to the job begun, waiting at most `seconds` more; a late process is ended."""
        assert self._connection is not None
        spent = time.monotonic() - self._began
        if not self._connection.poll(seconds):
            self.stop()
            return Answer(None, f"stopped after {spent + seconds:.0f} s", spent + seconds)
        try:
            answer, ending = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            code = self._process.exitcode
            self.stop()
            return Answer(None, f"the process ended with exit code {code}", time.monotonic() - self._began)
        if ending:
            self.stop()
        assert isinstance(answer, Answer)
        return answer

    def ask(self, job: Job, seconds: float) -> Answer:
        """A job from begin to end, in at most `seconds`."""
        self.begin(job)
        return self.finish(seconds)

    @property
    def age_seconds(self) -> float:
        """Since the last job was begun."""
        return time.monotonic() - self._began

    def stop(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            assert self._connection is not None
            self._connection.close()
        self._process = self._connection = None


def answers(
    jobs: Sequence[Job], workers: int, usable: Callable[[], None], *, seconds: float, seconds_each: float
) -> Iterator[tuple[int, Answer]]:
    """Runs jobs in `workers` processes, in order; yields the place of each with its answer as soon as it has one.

    Whoever takes the answers may append jobs meanwhile. What is not answered after `seconds` is stopped, and of what
    was not begun nothing is yielded.
    """
    end = time.monotonic() + seconds
    begun = 0
    idle: list[Worker] = []
    busy: dict[Connection, tuple[Worker, int]] = {}
    try:
        while begun < len(jobs) or busy:
            while begun < len(jobs) and len(busy) < workers and time.monotonic() < end:
                worker = idle.pop() if idle else Worker(usable)
                busy[worker.begin(jobs[begun])] = (worker, begun)
                begun += 1
            if not busy:
                return
            oldest = max(worker.age_seconds for worker, _ in busy.values())
            ready = wait(list(busy), max(0.0, min(end - time.monotonic(), seconds_each - oldest)))
            over = time.monotonic() >= end
            for connection, (worker, place) in list(busy.items()):
                if connection in ready or over or worker.age_seconds >= seconds_each:
                    del busy[connection]
                    answer = worker.finish(0)
                    late = answer.wrong is not None and connection not in ready
                    yield place, replace(answer, cut=late and worker.age_seconds < seconds_each)
                    idle.append(worker)
    finally:
        for worker in (*idle, *(worker for worker, _ in busy.values())):
            worker.stop()
