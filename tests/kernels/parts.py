"""Splits a case into its independent rows or sequences, so that a part's result can be held against the whole's."""

from __future__ import annotations

import torch

from day0_kernels.inputs import Inputs
from day0_kernels.spec import Case, Operator


def parts_of(operator: Operator, case: Case) -> int:
    """How many independent rows or sequences a case has."""
    if case.expert_rows:
        return sum(case.expert_rows)
    names = {tensor.name for tensor in operator.tensors}
    if letters(operator) == {"N"}:
        return case.sizes["N"]
    return len(case.new_tokens) if "cu_seqlens" in names or "T" not in letters(operator) else sum(case.new_tokens)


def letters(operator: Operator) -> set[int | str]:
    return {tensor.shape[0] for tensor in operator.tensors}


def has_parts(operator: Operator) -> bool:
    """Whether there is such a part: not in an operator on weights alone, nor where rows are put among each other."""
    return letters(operator) != {"E"} and not any(spec.shape[0] == "T * K" for spec in operator.outputs)


def pick(operator: Operator, inputs: Inputs, parts: list[int]) -> tuple[Inputs, list[int]]:
    """The call of some parts only, in the given order; and which rows of the whole call its output rows are."""
    tensors = dict(inputs.tensors)
    if "expert_offsets" in tensors:
        return _pick_rows_of_experts(operator, inputs, parts)
    bounds = tensors["cu_seqlens"].tolist() if "cu_seqlens" in tensors else None
    rows = parts if bounds is None else [t for b in parts for t in range(bounds[b], bounds[b + 1])]
    for tensor in operator.tensors:
        if tensor.name == "cu_seqlens":
            assert bounds is not None
            lengths = [bounds[b + 1] - bounds[b] for b in parts]
            tensors["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(tensors["cu_seqlens"])
        elif tensor.shape[0] == "T" or letters(operator) == {"N"}:
            tensors[tensor.name] = tensors[tensor.name][rows]
        elif tensor.shape[0] == "B":
            tensors[tensor.name] = tensors[tensor.name][parts]
    return Inputs(tensors, inputs.scalars), rows


def _pick_rows_of_experts(operator: Operator, inputs: Inputs, parts: list[int]) -> tuple[Inputs, list[int]]:
    offsets = inputs.tensors["expert_offsets"].cpu()
    rows = sorted(parts, key=lambda i: int((offsets <= i).sum()))
    owners = torch.tensor([int((offsets <= i).sum()) - 1 for i in rows], dtype=torch.long)
    counts = torch.bincount(owners, minlength=len(offsets) - 1)
    tensors = dict(inputs.tensors) | {
        **{tensor.name: inputs.tensors[tensor.name][rows] for tensor in operator.tensors if tensor.shape[0] == "N"},
        "expert_offsets": torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(inputs.tensors["expert_offsets"]),
    }
    return Inputs(tensors, inputs.scalars), rows
