"""Runs families and peers in processes of their own and gathers the rows; it computes nothing on the device itself."""

from __future__ import annotations

import importlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from day0.bench.ops.families import PACKAGE, PEERS, Selection, families, modules_with, name_of
from day0.bench.ops.measure import count_shapes, measure_peer, measure_shape
from day0.bench.ops.peers.peer import Peer
from day0.bench.ops.processes import Answer, Job, Worker, answers
from day0.bench.ops.row import OURS, Row
from day0.bench.ops.table import show, show_ceilings, show_heading
from day0.bench.ops.timing import Ceilings, measure_ceilings
from svc_common.versions import versions_of

# Of one shape, its compilations and its reference; a wrong kernel can run for ever.
SECONDS_EACH = 120.0


class NoGpu(RuntimeError):
    """This process sees no CUDA device; the message says which torch looked."""


@dataclass(frozen=True, slots=True)
class OpsOptions:
    """What a run is asked for. `only` is empty for everything; after `seconds` no further shape is begun."""

    only: tuple[str, ...] = ()
    seconds: float = float("inf")
    peers: bool = True
    warm: bool = False
    workers: int = 4
    json: Path | None = None


@dataclass(frozen=True, slots=True)
class Functions:
    """What the processes run and where modules are looked for; tests have functions that need no GPU."""

    count: Callable[..., Any] = count_shapes
    shape: Callable[..., Any] = measure_shape
    peer: Callable[..., Any] = measure_peer
    ceilings: Callable[..., Any] = measure_ceilings
    usable: Callable[[], None] = torch.cuda.synchronize
    package: str = PACKAGE
    peers: str = PEERS


@dataclass
class Run:
    """One run: its rows so far, and where its lines go."""

    options: OpsOptions
    console: Console
    functions: Functions = field(default_factory=Functions)
    rows: list[Row] = field(default_factory=list)
    about: Mapping[str, str] = field(default_factory=dict)
    found: Ceilings | None = None
    kept: Callable[[list[Row]], None] = lambda rows: None

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.options.seconds
        known = families(self.functions.package)
        self.selection = Selection(self.options.only, known)
        self.adapters = modules_with("peers", self.functions.peers) if self.options.peers else ()
        self._theirs = self._worker()
        self._families = [(module, self._worker()) for module in known if self.selection.family(module)]

    @property
    def _left(self) -> float:
        return self._end - time.monotonic()

    def _worker(self) -> Worker:
        return Worker(self.functions.usable)

    def ceilings(self) -> Ceilings:
        """Measured and shown first, in a process that is gone before the first shape."""
        worker = self._worker()
        answer = worker.ask(Job(self.functions.ceilings), SECONDS_EACH)
        worker.stop()
        if answer.wrong is not None:
            raise RuntimeError(f"the ceilings could not be measured: {answer.wrong}")
        found: Ceilings = answer.value
        show_ceilings(found, self.about, self.console)
        self.found = found
        return found

    def _keep(self, row: Row, ours: Row | None = None) -> None:
        self.rows.append(row)
        show(row, self.console, ours)
        self.kept(self.rows)

    def _red(self, module: str, place: int | None, why: str) -> Row:
        shape = "all shapes" if place is None else f"shape {place + 1}"
        return Row(name_of(module), name_of(module), shape, OURS, wrong=why)

    def peer_jobs(self, row: Row, ceilings: Ceilings) -> Iterator[tuple[Peer, Job]]:
        """What measures the peers of a row of ours; an adapter that raises has a red line and no peer."""
        for module in self.adapters:
            try:
                found = list(importlib.import_module(module).peers(row.operator, row.shape))
            except Exception as error:  # other people's packages break in any way; that is a line, not our end
                why = f"{type(error).__name__}: {error}"
                self._keep(Row(row.family, row.operator, row.shape, name_of(module), wrong=why), row)
                continue
            for place, peer in enumerate(found):
                arguments = (module, place, row, ceilings, not self.options.warm)
                yield peer, Job(self.functions.peer, arguments)

    def _peer_row(self, row: Row, peer: Peer, answer: Answer) -> Row:
        if answer.wrong is None:
            found: Row = answer.value
            return found
        return Row(row.family, row.operator, row.shape, peer.who, note=peer.note, wrong=answer.wrong)

    def _begin(self, place: int) -> None:
        """Lets a family's process import what it needs, on another core, while something else is measured."""
        if place < len(self._families):
            module, worker = self._families[place]
            worker.begin(Job(self.functions.count, (module,)))

    def measure(self) -> None:
        """Family after family, each in a new process; the peers of a shape follow it, in one of their own."""
        try:
            self._begin(0)
            self._theirs.begin(Job(self.functions.usable))
            ceilings = self.ceilings()
            self._theirs.finish(SECONDS_EACH)
            show_heading(self.console)
            for place, (module, worker) in enumerate(self._families):
                counted = worker.finish(SECONDS_EACH)
                self._begin(place + 1)
                if counted.wrong is None:
                    self._family(module, counted.value, worker, ceilings)
                else:
                    self._keep(self._red(module, None, counted.wrong))
                worker.stop()
        finally:
            for worker in (self._theirs, *(worker for _, worker in self._families)):
                worker.stop()

    def _family(self, module: str, count: int, ours: Worker, ceilings: Ceilings) -> None:
        for place in range(count):
            if self._left <= 0:
                said = f"not begun: {name_of(module)}, shapes {place + 1} to {count}"
                self.console.print(said, style="red", highlight=False)
                return
            job = Job(self.functions.shape, (module, place, self.selection, ceilings, True))
            answer = ours.ask(job, SECONDS_EACH)
            if answer.wrong is not None:
                self._keep(self._red(module, place, answer.wrong))
            elif answer.value is not None:
                self._keep(answer.value)
                for peer, job in self.peer_jobs(answer.value, ceilings):
                    if self._left > 0:
                        self._keep(
                            self._peer_row(answer.value, peer, self._theirs.ask(job, SECONDS_EACH)), answer.value
                        )

    def warm(self) -> None:
        """Builds and checks everything once, `workers` shapes at a time, so that later nothing compiles."""
        ceilings, modules = self.ceilings(), [module for module, _ in self._families]
        jobs = [Job(self.functions.count, (module,)) for module in modules]
        # What to do with each job's answer; answers bring further jobs.
        taken: list[Callable[[Answer], None]] = []

        def add(job: Job, take: Callable[[Answer], None]) -> None:
            jobs.append(job)
            taken.append(take)

        def shapes(module: str, answer: Answer) -> None:
            if answer.wrong is not None:
                self._keep(self._red(module, None, answer.wrong))
                return
            for place in range(answer.value):
                job = Job(self.functions.shape, (module, place, self.selection, ceilings, False))
                add(job, partial(shape, module, place))

        def shape(module: str, place: int, answer: Answer) -> None:
            if answer.wrong is not None:
                self._keep(self._red(module, place, answer.wrong))
            elif answer.value is not None:
                self._keep(answer.value)
                for peer, job in self.peer_jobs(answer.value, ceilings):
                    take = partial(theirs, answer.value, peer)
                    if peer.who in right or peer.who not in following:
                        following.setdefault(peer.who, [])
                        add(job, take)
                    else:
                        following[peer.who].append((job, take))

        def theirs(row: Row, peer: Peer, answer: Answer) -> None:
            self._keep(self._peer_row(row, peer, answer), row)
            if answer.wrong is None and peer.who not in right:
                right.add(peer.who)
                for job, take in following[peer.who]:
                    add(job, take)

        # A peer's other shapes wait for its first one, whose compilation they share or would stand in line for; where
        # that one raised, they raise when they are timed.
        following: dict[str, list[tuple[Job, Callable[[Answer], None]]]] = {}
        right: set[str] = set()
        taken += [partial(shapes, module) for module in modules]
        done = 0
        limits = {"seconds": max(self._left, 0.0), "seconds_each": SECONDS_EACH}
        for place, answer in answers(jobs, self.options.workers, self.functions.usable, **limits):
            taken[place](answer)
            done += 1
        if done < len(jobs):
            self.console.print(f"not begun: {len(jobs) - done} of {len(jobs)}", style="red", highlight=False)


def about_device() -> dict[str, str]:
    """Device, driver and versions, for whoever repeats the run."""
    device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, **versions_of("triton")}
    return {"device": device, "driver": driver_version(), "cuda": str(torch.version.cuda), **versions}


def driver_version() -> str:
    """Of the NVIDIA driver, as its own tool says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()


def document(about: Mapping[str, str], ceilings: Ceilings, rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """The whole result as JSON."""
    return {
        "about": dict(about),
        "ceilings": asdict(ceilings),
        "seconds": round(seconds, 1),
        "rows": [row.to_json() for row in rows],
    }


def bench_ops(options: OpsOptions, console: Console) -> bool:
    """The whole command. True when every line of ours is right; NoGpu where there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise NoGpu(
            f"no GPU: torch {torch.__version__} sees no CUDA device here, and these kernels run on nothing else"
        )
    began, about = time.monotonic(), about_device()

    def save(rows: Sequence[Row]) -> None:
        """After every row, so that a run that is stopped has what it measured."""
        if options.json is not None and run.found is not None:
            seconds = time.monotonic() - began
            options.json.write_text(json.dumps(document(about, run.found, rows, seconds), indent=1) + "\n")

    run = Run(options, console, kept=save, about=about)
    if options.warm:
        run.warm()
    else:
        run.measure()
    ours = [row for row in run.rows if row.ours]
    return bool(ours) and not any(row.wrong for row in ours)
