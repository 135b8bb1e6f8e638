"""Processes that answer one job at a time: results, exceptions, deaths and hangs, each without harm to the next job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from day0.bench.ops.processes import Job, Worker, answers

# Starting one imports what the test run has imported.
ENOUGH_SECONDS = 60.0


def _lost() -> None:
    raise RuntimeError("device context lost")


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(os.getpid)
    yield made
    made.stop()


def test_one_process_answers_job_after_job(worker: Worker) -> None:
    first, second = (worker.ask(Job(os.getpid), ENOUGH_SECONDS) for _ in range(2))
    assert first.value == second.value != os.getpid()
    assert first.wrong is None


def test_an_exception_is_an_answer_and_the_process_goes_on(worker: Worker) -> None:
    pid = worker.ask(Job(os.getpid), ENOUGH_SECONDS).value
    assert worker.ask(Job(int, ("x",)), ENOUGH_SECONDS).wrong == (
        "ValueError: invalid literal for int() with base 10: 'x'"
    )
    assert worker.ask(Job(os.getpid), ENOUGH_SECONDS).value == pid


def test_a_process_that_is_unusable_after_an_exception_is_replaced() -> None:
    worker = Worker(_lost)
    first = worker.ask(Job(os.getpid), ENOUGH_SECONDS).value
    worker.ask(Job(int, ("x",)), ENOUGH_SECONDS)
    second = worker.ask(Job(os.getpid), ENOUGH_SECONDS)
    worker.stop()
    assert second.wrong is None
    assert second.value != first


def test_a_death_is_an_answer_with_the_exit_code(worker: Worker) -> None:
    assert worker.ask(Job(os._exit, (7,)), ENOUGH_SECONDS).wrong == "the process ended with exit code 7"
    assert worker.ask(Job(int, ("3",)), ENOUGH_SECONDS).value == 3


def test_a_late_job_is_stopped_and_the_next_one_answered(worker: Worker) -> None:
    worker.ask(Job(int, ("3",)), ENOUGH_SECONDS)
    late = worker.ask(Job(time.sleep, (3600,)), 0.1)
    assert late.wrong is not None and late.wrong.startswith("stopped after")
    assert worker.ask(Job(int, ("3",)), ENOUGH_SECONDS).value == 3


def test_many_jobs_in_two_processes_each_have_their_own_answer() -> None:
    jobs = [Job(int, (text,)) for text in ("0", "1", "x", "3")] + [Job(os._exit, (1,)), Job(int, ("5",))]
    found = dict(answers(jobs, 2, os.getpid, seconds=ENOUGH_SECONDS, seconds_each=ENOUGH_SECONDS))
    assert [found[i].value for i in range(6)] == [0, 1, None, 3, None, 5]
    assert found[2].wrong is not None and "invalid literal" in found[2].wrong
    assert found[4].wrong == "the process ended with exit code 1"


def test_jobs_may_be_added_while_answers_are_taken() -> None:
    jobs, found = [Job(int, ("0",))], []
    for place, answer in answers(jobs, 2, os.getpid, seconds=ENOUGH_SECONDS, seconds_each=ENOUGH_SECONDS):
        found.append((place, answer.value))
        if place < 2:
            jobs.append(Job(int, (str(place + 1),)))
    assert found == [(0, 0), (1, 1), (2, 2)]


def test_after_the_time_what_runs_is_stopped_and_nothing_more_is_begun() -> None:
    jobs = [Job(time.sleep, (3600,)), Job(int, ("1",))]
    found = dict(answers(jobs, 1, os.getpid, seconds=0.5, seconds_each=ENOUGH_SECONDS))
    assert list(found) == [0]
    assert found[0].wrong is not None and found[0].cut


def test_a_job_that_hangs_holds_up_no_other() -> None:
    jobs = [Job(time.sleep, (3600,)), Job(int, ("1",))]
    found = dict(answers(jobs, 1, os.getpid, seconds=ENOUGH_SECONDS, seconds_each=3.0))
    assert found[0].wrong is not None and found[0].wrong.startswith("stopped after")
    assert not found[0].cut
    assert found[1].value == 1
