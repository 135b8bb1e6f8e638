"""Sets each part of a definition beside the operators and backends that would compute it on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from day0.gap.bound import bound_classes, float_expert_operators, packed_expert_operators
from day0.gap.device import Device
from day0.gap.kinds import PLAIN, Kind, kind_of, operator_sizes
from day0.inventory.definition import PATCH_MAPPING, seam_of
from day0.inventory.inventory import Inventory
from day0_kernels import registry
from day0_kernels.described_device import described
from llm_svc.adopt.families import FAMILIES

REFERENCE = "reference"
_BOUND = Kind("as the family binds it")


class Status(StrEnum):
    """How far a part is from production on the device, the best first."""

    NATIVE = "native"
    REFERENCE_ONLY = "reference only"
    UPSTREAM_ONLY = "upstream only"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class OperatorAnswer:
    """What the backends say about one operator; `chosen` is the one the registry takes, None where all refuse."""

    operator: str
    chosen: str | None
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """Modules of one class and kind. `flops` are those of a decode step, everything below included, None untraced."""

    name: str
    kind: Kind
    count: int
    seam: str
    bound: bool
    status: Status
    operators: tuple[OperatorAnswer, ...]
    flops: int | None

    @property
    def why(self) -> str:
        """What keeps it from being native, in a few words."""
        refusals: dict[str, list[str]] = {}
        for answer in self.operators:
            if answer.chosen in (None, REFERENCE):
                for backend, reason in answer.refused.items():
                    refusals.setdefault(f"{backend}: {reason}", []).append(answer.operator)
        alone = [a.operator for a in self.operators if a.chosen == REFERENCE and not a.refused]
        said = [f"{', '.join(alone)}: no backend but the reference"] if alone else []
        if self.kind.lacking and not self.bound:
            said.append(self.kind.lacking)
        return "; ".join([*said, *(f"{', '.join(operators)}: {reason}" for reason, operators in refusals.items())])


def find_parts(model: nn.Module, inventory: Inventory, config: Any, device: Device, dtype: torch.dtype) -> list[Part]:
    """Every class of the definition that a text prompt runs, those of plain torch as one part."""
    called: dict[str, set[str]] = {}
    for call in inventory.prefill.operators:
        called.setdefault(call.caller, set()).add(call.name)
    family = FAMILIES.get(inventory.model_type)
    bound = bound_classes(family) if family else {}
    ours = {cls.__name__: name for name, cls in family.classes.items()} if family else {}
    text_config = config.get_text_config()
    groups: dict[tuple[str, Kind], list[nn.Module]] = {}
    for path, module in model.named_modules():
        if inventory.not_traced:
            # Nothing ran, so that only names tell what is not of the text model.
            elsewhere = any(word in path for word in ("visual", "vision", "audio"))
        else:
            elsewhere = id(module) not in inventory.prefill.ran
        name = ours.get(type(module).__name__, type(module).__name__)
        if not elsewhere:
            groups.setdefault((name, kind_of(module, frozenset(called.get(name, ())))), []).append(module)
    flops: dict[str, int] = {}
    for row in inventory.modules:
        if row.decode_within is not None:
            flops[row.name] = flops.get(row.name, 0) + row.decode_within.flops
    parts = []
    plain = 0
    with described(device.capability):
        for (name, kind), modules in groups.items():
            operators = bound.get(name, _absorbed(model, modules[0], kind, bound))
            if kind.name == "experts" and family:
                operators = float_expert_operators()
            if kind is PLAIN and not operators:
                plain += len(modules)
                continue
            answers = _ask(operators or kind.operators, kind, modules[0], text_config, device, dtype)
            parts.append(
                Part(
                    name=name,
                    kind=_BOUND if kind is PLAIN else kind,
                    count=len(modules),
                    seam=seam_of(type(modules[0])),
                    bound=operators is not None,
                    status=_status(kind, operators is not None, answers),
                    operators=answers,
                    flops=flops.get(name),
                )
            )
            if kind.name == "experts" and family:
                packed = Kind("experts in MXFP4", packed_expert_operators())
                answers = _ask(packed.operators, packed, modules[0], text_config, device, dtype)
                status = _status(packed, True, answers)
                parts.append(Part(name, packed, len(modules), parts[-1].seam, True, status, answers, None))
    parts.append(Part("norms, products, embeddings", PLAIN, plain, PATCH_MAPPING, True, Status.NATIVE, (), None))
    return parts


def _absorbed(
    model: nn.Module, module: nn.Module, kind: Kind, bound: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...] | None:
    """Operators of this kind that a bound class around the module calls in its place; None where there is none."""
    path = next(path for path, found in model.named_modules() if found is module)
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        around = type(model.get_submodule(".".join(parts[:length]))).__name__
        called = tuple(operator for operator in bound.get(around, ()) if operator in kind.operators)
        if called:
            return called
    return None


def _ask(
    operators: Iterable[str], kind: Kind, module: nn.Module, config: Any, device: Device, dtype: torch.dtype
) -> tuple[OperatorAnswer, ...]:
    """The registry's own answers at this module's sizes."""
    answers = []
    for operator in operators:
        refused: dict[str, str] = {}
        sizes = operator_sizes(kind, operator, module, config)
        for backend in registry.backends(operator):
            try:
                registry.resolve(operator, device.type, dtype, backend=backend, sizes=sizes)
            except registry.BackendRefused as error:
                refused[backend] = error.reason
        try:
            chosen = registry.resolve(operator, device.type, dtype, sizes=sizes).backend
        except registry.BackendRefused:
            chosen = None
        answers.append(OperatorAnswer(operator, chosen, refused))
    return tuple(answers)


def _status(kind: Kind, bound: bool, answers: tuple[OperatorAnswer, ...]) -> Status:
    if any(answer.chosen is None for answer in answers):
        return Status.MISSING
    if not bound:
        return Status.UPSTREAM_ONLY if answers else Status.MISSING
    if any(answer.chosen == REFERENCE for answer in answers):
        return Status.REFERENCE_ONLY
    return Status.NATIVE
