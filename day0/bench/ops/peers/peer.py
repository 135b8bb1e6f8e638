"""What an adapter says about one peer at one of our shapes; it imports no peer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's function by the name of its package's module and its own.

    `make` builds inputs of the same size as ours on the GPU and returns what a family's thunk returns. `graph` is false
    where the call cannot be captured. `note` says what is not alike: other dtypes, a part of the work alone.
    """

    module: str
    function: str
    make: Callable[[], Shape]
    note: str = ""
    graph: bool = True

    @property
    def who(self) -> str:
        """Package, version and function."""
        return f"{self.module} {version_of(self.module)} {self.function}"


def installed(module: str) -> bool:
    """Whether a package of this import name can be found; it is not imported."""
    return find_spec(module) is not None


def load(module: str) -> Any:
    """A peer's module, imported when it is first needed."""
    return importlib.import_module(module)


def version_of(module: str) -> str:
    """Version of the distribution that brings an import name."""
    for distribution in packages_distributions().get(module.partition(".")[0], ()):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; infinite where got is not finite."""
    got, want = got.double(), want.double()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def normal(*shape: int) -> Tensor:
    """Random bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda").bfloat16()


def random_fp8(*shape: int) -> Tensor:
    """Random e4m3 on the GPU, made in pieces so that no float32 copy of all of it is held."""
    out = torch.empty(*shape, dtype=torch.float8_e4m3fn, device="cuda")
    for piece in out.view(-1).split(1 << 28):
        piece.copy_(torch.randn(len(piece), device="cuda").to(torch.float8_e4m3fn))
    return out
