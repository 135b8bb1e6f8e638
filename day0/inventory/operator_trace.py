"""Runs a definition on meta tensors and writes down every operator it calls: shapes, FLOPs, bytes, and in which class.

FLOPs are two a multiplication with addition of matrix products, convolutions and attention, as
`torch.utils.flop_counter` counts them; element-wise work has none. Bytes are those an operator reads and writes when
each runs on its own: views move nothing, a lookup moves the rows it takes, an expanded tensor counts once.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

EXPERTS = "experts"
_aten = torch.ops.aten
_FREE = {"_unsafe_view", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "detach", "sym_size"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator at one set of input shapes, in the class that calls it."""

    name: str
    caller: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(slots=True)
class Cost:
    """Calls, FLOPs and bytes that add up."""

    calls: int = 0
    flops: int = 0
    size_bytes: int = 0

    def add(self, flops: int, size_bytes: int) -> None:
        """One more call."""
        self.calls += 1
        self.flops += flops
        self.size_bytes += size_bytes


@dataclass(slots=True)
class Trace:
    """What one forward cost: by operator, by the module it was called in (`own`) and by all around it (`within`)."""

    operators: dict[OperatorCall, Cost] = field(default_factory=dict)
    own: dict[str, Cost] = field(default_factory=dict)
    within: dict[str, Cost] = field(default_factory=dict)
    assumed: Counter[str] = field(default_factory=Counter)
    ran: set[int] = field(default_factory=set)
    """Identities of modules that were called and of parameters that an operator or a view took."""

    @property
    def total(self) -> Cost:
        """Of the whole forward."""
        costs = self.operators.values()
        return Cost(sum(c.calls for c in costs), sum(c.flops for c in costs), sum(c.size_bytes for c in costs))


class _Kind(Enum):
    """How an operator is dealt with: it moves nothing, it writes into its first argument, or it makes something."""

    FREE = "free"
    IN_PLACE = "in place"
    MAKES = "makes"


@dataclass(frozen=True, slots=True)
class _Known:
    """Cost of an operator at one signature, and what it makes where that is one tensor: shape, strides, dtype."""

    flops: int
    size_bytes: int
    made: tuple[Any, ...] | None


class OperatorTrace(TorchDispatchMode):
    """While entered, meta tensors are computed as usual and every operator is recorded under the module it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.stack: list[tuple[str, str]] = []
        self._known: dict[Any, _Known] = {}
        self._calls: dict[Any, OperatorCall] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records one operator; a choice that depends on values is taken as if everything were chosen."""
        kwargs = kwargs or {}
        self.trace.ran |= {id(arg) for arg in args if type(arg) is nn.Parameter}
        args = self._settle(func, args)
        if func is _aten.nonzero.default:
            self.trace.assumed["nonzero: every element counts"] += 1
            shape = args[0].shape
            return args[0].new_empty((math.prod(shape), len(shape)), dtype=torch.long)
        name, kind = _about(func)
        if kind is _Kind.FREE:
            return func(*args, **kwargs)
        key = (func, _signature(args), _signature(kwargs))
        known = self._known.get(key)
        if known is None or known.made is None:
            # What writes into its first argument gives it back; there is nothing to compute in it.
            out = args[0] if kind is _Kind.IN_PLACE else func(*args, **kwargs)
        else:
            out = torch.empty_strided(known.made[0], known.made[1], dtype=known.made[2], device="meta")
        if known is None:
            known = self._known[key] = _Known(*_cost(func, args, kwargs, out), _made(out, kind))
        self.record(self._call(name, key, args, kwargs), known.flops, known.size_bytes)
        return out

    def _call(self, name: str, key: Any, args: Any, kwargs: Any) -> OperatorCall:
        """The operator under the innermost module, made once for each signature."""
        caller = self.stack[-1][1] if self.stack else ""
        call = self._calls.get((key, caller))
        if call is None:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            call = self._calls[key, caller] = _operator_call(name, caller, read)
        return call

    def record(self, call: OperatorCall, flops: int, size_bytes: int) -> None:
        """Adds one call to the operator, the innermost module and all modules around it."""
        self.trace.operators.setdefault(call, Cost()).add(flops, size_bytes)
        if self.stack:
            self.trace.own.setdefault(self.stack[-1][0], Cost()).add(flops, size_bytes)
        for key in {key for key, _ in self.stack}:
            self.trace.within.setdefault(key, Cost()).add(flops, size_bytes)

    def _settle(self, func: Any, args: Any) -> Any:
        """Boolean indices become the positions they would select if all of them were true."""
        if func.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.trace.assumed["boolean selection: every element is selected"] += 1
                indices += [index.new_empty(math.prod(index.shape), dtype=torch.long)] * index.dim()
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])


@contextmanager
def tracing(model: nn.Module, keys: dict[nn.Module, str]) -> Iterator[Trace]:
    """While open, forwards of `model` are recorded; `keys` names what each module counts under.

    Experts are not run as they are written (a loop over those that were hit): each token takes its `top_k`, and the
    weights of an expert are read once.
    """
    mode = OperatorTrace()
    handles = []
    replaced: list[nn.Module] = []
    for module, key in keys.items():
        entry = (key, type(module).__name__)

        def enter(module: nn.Module, args: Any, entry: tuple[str, str] = entry) -> None:
            mode.stack.append(entry)
            mode.trace.ran.add(id(module))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            mode.stack.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
        if is_routed(module):
            # An attribute of this object only: the class stays upstream's.
            module.forward = partial(_experts, mode, module)
            replaced.append(module)
    try:
        with torch.no_grad(), torch.device("meta"), mode:
            yield mode.trace
    finally:
        for handle in handles:
            handle.remove()
        for module in replaced:
            del module.forward


def is_routed(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer in stacked matrices and is told which ones each token takes."""
    stacked = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() == 3]
    # State space layers have stacked matrices too, and no experts.
    named = "xpert" in type(module).__name__
    return named and len(stacked) >= 2 and len(inspect.signature(type(module).forward).parameters) >= 4


def _experts(
    mode: OperatorTrace, module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    """hidden [T, hidden] and the chosen experts [T, top_k] -> [T, hidden]; records one operator."""
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    stacked = [parameter for parameter in parameters if parameter.dim() == 3]
    mode.trace.ran |= {id(parameter) for parameter in parameters}
    rows = chosen.numel()
    flops = 2 * rows * sum(parameter.numel() // len(parameter) for parameter in stacked)
    weights = sum(min(len(parameter), rows) * (parameter.nbytes // len(parameter)) for parameter in parameters)
    call = _operator_call(EXPERTS, mode.stack[-1][1], [hidden, chosen, *stacked])
    mode.record(call, flops, weights + 2 * _bytes(hidden))
    return torch.empty_like(hidden)


def _operator_call(name: str, caller: str, read: list[torch.Tensor]) -> OperatorCall:
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in read)
    return OperatorCall(name, caller, tuple(tuple(tensor.shape) for tensor in read), dtypes)


@cache
def _about(func: Any) -> tuple[str, _Kind]:
    name, returns = func.overloadpacket.__name__, func._schema.returns
    if name in _FREE or (
        returns and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    ):
        return name, _Kind.FREE
    in_place = len(returns) == 1 and returns[0].alias_info is not None and name.endswith("_")
    return name, _Kind.IN_PLACE if in_place else _Kind.MAKES


def _signature(value: Any) -> Any:
    """What the result and the cost of an operator depend on, as a key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(_signature(one) for one in value)
    if isinstance(value, dict):
        return tuple((key, _signature(one)) for key, one in value.items())
    return type(value), value


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """FLOPs and bytes of one call."""
    counts = flop_registry.get(func.overloadpacket)
    flops = int(counts(*args, **kwargs, out_val=out)) if counts else 0
    written = sum(_bytes(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
    if func.overloadpacket.__name__ in _LOOKUPS:
        return flops, 2 * written
    read = sum(_bytes(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return flops, written + read


def _made(out: Any, kind: _Kind) -> tuple[Any, ...] | None:
    single = kind is _Kind.MAKES and type(out) is torch.Tensor and out.device.type == "meta"
    return (out.shape, out.stride(), out.dtype) if single else None


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor, dimensions of stride 0 counted once."""
    distinct = math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0
    )
    return distinct * tensor.element_size()
