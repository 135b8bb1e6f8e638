"""Which backend computes an operator on a device: discovery, choice and refusal; it knows no operator's arithmetic.

An operator is declared in the `spec.py` of a folder of this package (attribute `OPERATORS`). Every other module of
the folder whose name has no leading underscore is a backend: it has a `BACKEND` and functions named after the
operators it implements, and may have `refusal(operator, device, dtype, sizes) -> str | None`. An installed distribution
adds backends by entry points of the group `day0.kernels`, each naming such a module. A backend is imported when it is
first asked for.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from day0_kernels.spec import Backend, Operator, ScratchSpec

ENTRY_POINT_GROUP = "day0.kernels"
_log = logging.getLogger(__name__)
_told: set[tuple[str, str, str]] = set()


class UnknownOperator(LookupError):
    """No spec declares this operator name."""


class BackendRefused(RuntimeError):
    """A backend cannot serve the call; `operator`, `backend` and `reason` say which and why."""

    def __init__(self, operator: str, backend: str, reason: str) -> None:
        super().__init__(f"{operator}: backend {backend!r} refused: {reason}")
        self.operator, self.backend, self.reason = operator, backend, reason


@dataclass(frozen=True, slots=True)
class Resolved:
    """A backend's function for one operator."""

    operator: Operator
    backend: str
    fn: Callable[..., Any]
    scratch: tuple[ScratchSpec, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer of one backend for one operator: accepted when `reason` is None."""

    operator: str
    backend: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Source:
    """A backend not imported yet: its name and how to import it."""

    name: str
    load: Callable[[], ModuleType]


@cache
def _folders() -> Mapping[str, str]:
    """Folder of each operator name."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg and (Path(__file__).parent / module.name / "spec.py").is_file():
            for operator in importlib.import_module(f"day0_kernels.{module.name}.spec").OPERATORS:
                assert operator.name not in found, (
                    f"{operator.name} is declared in {found[operator.name]} and {module.name}"
                )
                found[operator.name] = module.name
    return found


def operators() -> tuple[Operator, ...]:
    """Every declared operator, in the order of their names."""
    return tuple(operator(name) for name in sorted(_folders()))


def operator(name: str) -> Operator:
    """The operator of this name; UnknownOperator lists the known ones."""
    if name not in _folders():
        raise UnknownOperator(f"operator {name!r} is not declared, known are {', '.join(sorted(_folders()))}")
    module = importlib.import_module(f"day0_kernels.{_folders()[name]}.spec")
    found: Operator = next(declared for declared in module.OPERATORS if declared.name == name)
    return found


def _sources(name: str) -> list[_Source]:
    folder = _folders()[name]
    sources = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent / folder)]):
        if module.name != "spec" and not module.name.startswith("_"):
            path = f"day0_kernels.{folder}.{module.name}"
            sources.append(_Source(module.name, partial(importlib.import_module, path)))
    ours = {source.name for source in sources}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in ours:
            owner = entry.dist.name if entry.dist else "unknown"
            raise ImportError(f"entry point {entry.name!r} of distribution {owner} takes the name of another backend")
        ours.add(entry.name)
        sources.append(_Source(entry.name, entry.load))
    return sources


def backends(name: str) -> tuple[str, ...]:
    """Names of all backends that exist for an operator, whether or not they would serve here."""
    operator(name)
    return tuple(source.name for source in _sources(name))


def _ask(
    declared: Operator, source: _Source, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]
) -> tuple[int, Resolved]:
    """Priority and function of a backend, or BackendRefused."""

    def refuse(reason: str) -> BackendRefused:
        return BackendRefused(declared.name, source.name, reason)

    try:
        module = source.load()
    except Exception as error:  # a backend may fail to import in any way; that is its refusal, never our crash
        raise refuse(f"import failed: {type(error).__name__}: {error}") from error
    about = getattr(module, "BACKEND", None)
    if not isinstance(about, Backend):
        raise refuse("its module has no BACKEND of type day0_kernels.spec.Backend")
    if about.name != source.name:
        raise refuse(f"its BACKEND is called {about.name!r}")
    fn = getattr(module, declared.name, None)
    if fn is None:
        raise refuse("does not implement this operator")
    dtype_name = str(dtype).removeprefix("torch.")
    if about.devices and device.type not in about.devices:
        raise refuse(f"device {device.type} is not among {', '.join(about.devices)}")
    if about.dtypes and dtype_name not in about.dtypes:
        raise refuse(f"dtype {dtype_name} is not among {', '.join(about.dtypes)}")
    ask = getattr(module, "refusal", None)
    reason = ask(declared.name, device, dtype, sizes) if ask else None
    if reason is not None:
        raise refuse(reason)
    return about.priority, Resolved(declared, source.name, fn, about.scratch.get(declared.name, ()))


def resolve(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Resolved:
    """The function that computes operator `name` on `device` in `dtype`.

    With `backend` given that one or BackendRefused; otherwise the one of highest priority that does not refuse, and
    each refusal is logged once. `sizes` are the dimensions known beforehand (letters of the spec), for backends that
    refuse by shape. Errors: UnknownOperator, BackendRefused (its reason lists every backend's when none serves).
    """
    declared, place = operator(name), torch.device(device)
    sources = _sources(name)
    if backend is not None:
        sources = [source for source in sources if source.name == backend]
        if not sources:
            raise BackendRefused(name, backend, f"no such backend, known are {', '.join(backends(name))}")
    best: tuple[int, Resolved] | None = None
    refusals: list[BackendRefused] = []
    for source in sources:
        try:
            priority, found = _ask(declared, source, place, dtype, sizes or {})
        except BackendRefused as refused:
            if backend is not None:
                raise
            refusals.append(refused)
            continue
        if best is not None and best[0] == priority:
            raise BackendRefused(
                name, source.name, f"same priority {priority} as {best[1].backend!r}: name one of them"
            )
        if best is None or priority > best[0]:
            best = (priority, found)
    for refusal in refusals:
        key = (name, refusal.backend, refusal.reason)
        if key not in _told:
            _told.add(key)
            _log.info("%s", refusal)
    if best is None:
        raise BackendRefused(name, "any", "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in refusals))
    return best[1]


def report(device: torch.device | str, dtype: torch.dtype, sizes: Mapping[str, int] | None = None) -> list[Verdict]:
    """What every backend says about every operator here, for the gap report."""
    verdicts = []
    for declared in operators():
        for source in _sources(declared.name):
            reason = None
            try:
                _ask(declared, source, torch.device(device), dtype, sizes or {})
            except BackendRefused as refused:
                reason = refused.reason
            verdicts.append(Verdict(declared.name, source.name, reason))
    return verdicts
