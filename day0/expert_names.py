"""Which tensors of a checkpoint are routed experts, by name and shape; it reads no file."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SINGLE = re.compile(r"(?P<prefix>(?:.+\.)?experts)\.(?P<expert>\d+)\.(?:gate|up|down)_proj\.weight")
_STACKED = re.compile(r"(?P<prefix>(?:.+\.)?experts)\.(?P<projection>gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One matrix `[rows, columns]` of one expert, from element `first_element` of its tensor on.

    `module` is the name it has as a module of its own, `{prefix}.{expert}.{gate,up,down}_proj`.
    """

    prefix: str
    expert: int
    module: str
    rows: int
    columns: int
    first_element: int


def expert_matrices(name: str, shape: tuple[int, ...]) -> tuple[ExpertMatrix, ...]:
    """The matrices a tensor holds, in the order of its bytes; none where it is no routed expert's weight.

    Known are `{prefix}.{expert}.{gate,up,down}_proj.weight` `[N, K]`, and stacked `{prefix}.gate_up_proj` `[E, 2I, H]`
    with the gate's rows first and `{prefix}.down_proj` `[E, H, I]`. A shared expert is not routed.
    """
    if len(shape) == 2 and (match := _SINGLE.fullmatch(name)):
        module = name.removesuffix(".weight")
        return (ExpertMatrix(match["prefix"], int(match["expert"]), module, shape[0], shape[1], 0),)
    if len(shape) == 3 and (match := _STACKED.fullmatch(name)):
        projections = ("gate_proj", "up_proj") if match["projection"] == "gate_up_proj" else ("down_proj",)
        experts, all_rows, columns = shape
        rows = all_rows // len(projections)
        return tuple(
            ExpertMatrix(
                match["prefix"],
                expert,
                f"{match['prefix']}.{expert}.{projection}",
                rows,
                columns,
                (expert * all_rows + number * rows) * columns,
            )
            for expert in range(experts)
            for number, projection in enumerate(projections)
        )
    return ()
