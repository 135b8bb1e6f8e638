"""Checks of the gated delta and short convolution kernels under Triton's interpreter, a line of JSON for each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_delta_checks`), because Triton decides when it
is imported whether it interprets. `test_triton_gated_delta.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from day0_kernels import registry
from day0_kernels.comparison import compare, run, same_bits
from day0_kernels.delta_gates import reference as gates
from day0_kernels.delta_gates.triton import delta_gates, gated_norm
from day0_kernels.gated_delta import reference
from day0_kernels.gated_delta.triton import gated_delta_decode, gated_delta_prefill, refusal
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.short_conv import triton as convolution
from day0_kernels.spec import Case, Tolerance
from tests.kernels.check_process import answer_checks
from tests.kernels.naive import define

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        gated_delta_prefill,
        gated_delta_decode,
        convolution.short_conv_prefill,
        convolution.short_conv_decode,
        delta_gates,
        gated_norm,
    )
}
# Even seeds hand out the lowest state slot first, odd ones the highest.
SLOTS_AT_BOTH_EDGES = ("edges", "some_padding", "padding_rows", "one")
_DELTA = {"scale": 0.25, "l2norm_eps": 1e-6}
# Beside the specs' own cases: every length about a chunk of 16 at once, and widths that are no power of two.
CASES: Mapping[tuple[str, str], Case] = {
    ("gated_delta_prefill", "edges"): Case(
        "edges",
        {"H": 1, "K": 16, "V": 16, "states": 8},
        (3, 1, 15, 16, 17, 0, 33),
        (2, 0, 9, 3, 0, 4, 2),
        _DELTA | {"chunk_size": 16},
        padded_sequences=1,
    ),
    ("gated_delta_prefill", "odd_widths"): Case(
        "odd_widths", {"H": 2, "K": 24, "V": 72, "states": 3}, (5, 18), (1, 0), _DELTA | {"chunk_size": 64}
    ),
    ("gated_delta_decode", "odd_widths"): Case(
        "odd_widths", {"H": 3, "K": 24, "V": 72, "states": 4}, (1, 1, 1), (4, 0, 7), _DELTA, padded_sequences=1
    ),
    # More sequences than a program looks at in one go, most of them without a token.
    ("short_conv_prefill", "many_sequences"): Case(
        "many_sequences",
        {"C": 3, "K": 4, "states": 258},
        tuple({0: 2, 100: 17, 254: 1, 255: 3, 256: 20, 257: 5}.get(b, 0) for b in range(258)),
        tuple(b % 3 for b in range(258)),
        {"activation": "silu"},
    ),
}


def _tensors(length: int, gate: float | str | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    drawn = -5 * torch.sigmoid(3 * normal(length, 1, 16))
    if gate == "late":
        # Most of the decay first: what follows would be the difference of two large sums.
        drawn = torch.where(torch.arange(length)[:, None, None] % 16 < 8, -20.0, drawn * 1e-3)
    elif gate is not None:
        drawn = torch.full_like(drawn, float(gate))
    made = {
        "q": normal(length, 1, 16),
        "k": normal(length, 1, 16),
        "v": normal(length, 1, 16),
        "g": drawn,
        "beta": torch.sigmoid(normal(length, 1)),
    }
    return {name: x.to(dtype) for name, x in made.items()}


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _prefill(tensors: Mapping[str, Tensor], state: Tensor, *cuts: int) -> Tensor:
    """Slot 1 of `state`, in calls that begin at 0 and at each cut."""
    bounds = (0, *cuts, len(tensors["q"]))
    parts = [
        gated_delta_prefill(
            **{name: x[begin:end] for name, x in tensors.items()},
            state=state,
            state_slots=_ints(1),
            cu_seqlens=_ints(0, end - begin),
            scale=0.25,
            chunk_size=16,
        )
        for begin, end in pairwise(bounds)
    ]
    return torch.cat(parts)


def _decode(tensors: Mapping[str, Tensor], state: Tensor, first: int) -> Tensor:
    rows = [
        gated_delta_decode(
            **{name: x[t : t + 1] for name, x in tensors.items()}, state=state, state_slots=_ints(1), scale=0.25
        )
        for t in range(first, len(tensors["q"]))
    ]
    return torch.cat(rows)


def check_case(name: str, case: str, dtype: str) -> None:
    """Float64 within the tolerance of the call's dtype, the same bits twice, and slots at both edges."""
    operator = registry.operator(name)
    found = CASES.get((name, case)) or next(one for one in operator.cases if one.name == case)
    tolerance = Tolerance(
        {"float32": operator.tolerance.absolute[dtype]}, {"float32": operator.tolerance.relative[dtype]}
    )
    for seed in (0, 1) if case in SLOTS_AT_BOTH_EDGES else (0,):
        inputs = make_inputs(operator, found, seed=seed, dtype=getattr(torch, dtype))
        got = run(operator, FUNCTIONS[name], inputs)
        again = run(operator, FUNCTIONS[name], inputs) if seed == 0 and case != "many_sequences" else got
        wanted = define(name, inputs.tensors, inputs.scalars)
        for key, result in got.items():
            assert same_bits(result, again[key]), f"{key} has other bits in a second run"
            compared = compare(key, result.float(), wanted[key].float(), tolerance)
            assert compared.within, compared


def check_neighbours(name: str, case: str) -> None:
    """Each sequence alone has the bits it has among the others."""
    operator = registry.operator(name)
    found = CASES.get((name, case)) or next(one for one in operator.cases if one.name == case)
    inputs = make_inputs(operator, found, seed=3, dtype=torch.bfloat16)
    whole = run(operator, FUNCTIONS[name], inputs)
    bounds = inputs.tensors["cu_seqlens"].tolist() if "cu_seqlens" in inputs.tensors else None
    for b in range(len(found.new_tokens)):
        rows = slice(b, b + 1) if bounds is None else slice(bounds[b], bounds[b + 1])
        alone = dict(inputs.tensors)
        for tensor in operator.tensors:
            if tensor.name == "cu_seqlens":
                alone["cu_seqlens"] = _ints(0, rows.stop - rows.start)
            elif tensor.shape[0] in ("T", "B"):
                alone[tensor.name] = alone[tensor.name][rows if tensor.name != "state_slots" else slice(b, b + 1)]
        results = run(operator, FUNCTIONS[name], Inputs(alone, inputs.scalars))
        for spec in operator.outputs:
            assert same_bits(results[spec.name], whole[spec.name][rows]), f"{spec.name} of sequence {b}"


def check_gate(gate: str, dtype: str = "float32") -> None:
    """Log decays of any size against float64 token by token; gates stay float32, as a model makes them."""
    tensors = _tensors(37, {"drawn": None, "late": "late"}.get(gate, gate))
    tensors |= {name: tensors[name].to(getattr(torch, dtype)) for name in ("q", "k", "v", "beta")}
    state = torch.stack([torch.full((1, 16, 16), torch.nan), torch.ones(1, 16, 16)])
    call = {**tensors, "state": state, "state_slots": _ints(1), "cu_seqlens": _ints(0, 37)}
    wanted = define("gated_delta_prefill", call, {"scale": 0.25, "l2norm_eps": 1e-6})
    allowed = {"atol": 3e-6, "rtol": 1e-5} if dtype == "float32" else {"atol": 2e-3, "rtol": 8e-3}
    torch.testing.assert_close(_prefill(tensors, state).float(), wanted["out"].float(), **allowed)
    torch.testing.assert_close(state, wanted["state"].float(), equal_nan=True, **allowed)


def check_cut() -> None:
    """Cut at multiples of 16 the calls give the bits of one call, state included."""
    tensors = _tensors(53, dtype=torch.bfloat16)
    whole_state, state = torch.zeros(2, 1, 16, 16), torch.zeros(2, 1, 16, 16)
    whole = _prefill(tensors, whole_state)
    assert same_bits(_prefill(tensors, state, 16, 48), whole)
    assert same_bits(state, whole_state)


def check_then_decode() -> None:
    """Prefill in uneven pieces and then decode is the recurrence."""
    tensors = _tensors(27)
    state = torch.zeros(2, 1, 16, 16)
    call = {**tensors, "state": state, "state_slots": _ints(1), "cu_seqlens": _ints(0, 27)}
    wanted = define("gated_delta_prefill", call, {"scale": 0.25, "l2norm_eps": 1e-6})
    head = {name: x[:22] for name, x in tensors.items()}
    got = torch.cat([_prefill(head, state, 5, 17), _decode(tensors, state, 22)])
    torch.testing.assert_close(got, wanted["out"].float(), atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(state, wanted["state"].float(), atol=3e-6, rtol=1e-5)


def check_convolution_cut() -> None:
    """Cut anywhere, or one token at a time, the convolution gives the bits of one call."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(21, 5, generator=generator).bfloat16()
    weight = torch.randn(5, 4, generator=generator).bfloat16()
    results = []
    for bounds in ((0, 21), (0, 1, 3, 6, 16, 18, 21)):
        state = torch.zeros(2, 5, 3, dtype=torch.bfloat16)
        parts = [
            convolution.short_conv_prefill(x[begin:end], weight, state, _ints(1), _ints(0, end - begin))
            for begin, end in pairwise(bounds)
        ]
        results.append((torch.cat(parts), state))
    state = torch.zeros(2, 5, 3, dtype=torch.bfloat16)
    steps = [convolution.short_conv_decode(x[t : t + 1], weight, state, _ints(1)) for t in range(21)]
    results.append((torch.cat(steps), state))
    for got in results[1:]:
        assert same_bits(got[0], results[0][0]) and same_bits(got[1], results[0][1])


def check_layouts() -> None:
    """A gate per head by a stride of 0, and q, k, v as views of one tensor, give the bits of contiguous tensors."""
    tensors = _tensors(18, dtype=torch.bfloat16)
    tensors["g"] = tensors["g"][..., :1].expand(-1, -1, 16)
    mixed = torch.stack([tensors["q"], tensors["k"], tensors["v"]], 1)
    views = {**tensors, "q": mixed[:, 0], "k": mixed[:, 1], "v": mixed[:, 2]}
    plain = {name: x.contiguous() for name, x in tensors.items()}
    assert views["g"].stride(2) == 0 and views["q"].stride(0) == 48
    results = []
    for call in (views, plain):
        state = torch.zeros(2, 1, 16, 16)
        first = _prefill({name: x[:16] for name, x in call.items()}, state)
        results.append((first, _decode(call, state, 16), state))
    for got, wanted in zip(*results, strict=True):
        assert same_bits(got, wanted)
    # Rates are columns of a joined product.
    wide = torch.randn(18, 7, generator=torch.Generator().manual_seed(1))
    made = [
        delta_gates(tensors["q"][:, :, :4].expand(-1, 3, -1), rate, torch.zeros(12), torch.zeros(3), lower_bound=-5.0)
        for rate in (wide[:, 2:5], wide[:, 2:5].contiguous())
    ]
    assert all(same_bits(got, wanted) for got, wanted in zip(*made, strict=True))


def check_far_gates() -> None:
    """Where exp leaves float32 the gates are those of the definition, finite and not NaN."""
    forget = torch.tensor([-200.0, -20.0, 20.0, 21.0, 100.0, 200.0]).view(1, 1, 6)
    tensors = forget, forget[:, :, 0], torch.zeros(6), torch.zeros(1)
    for bound in (-5.0, None):
        made, defined = (fn(*tensors, lower_bound=bound) for fn in (delta_gates, gates.delta_gates))
        for got, wanted in zip(made, defined, strict=True):
            assert wanted.isfinite().all()
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def check_accuracy(keys: str) -> None:
    """With bfloat16 inputs the error against float64 is at most 1.5 times that of the float32 reference."""
    generator = torch.Generator().manual_seed(7)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    length, width = 64, 128
    k = normal(length, 1, width)
    if keys == "repeated":
        # The inverse of a chunk whose keys are nearly one: a power series would lose it.
        k = k[:1] + 1e-4 * k
    made = {"q": normal(length, 1, width), "k": k, "v": normal(length, 1, width)}
    narrow = {name: x.bfloat16() for name, x in made.items()}
    decay = 0.0 if keys == "repeated" else -5 * torch.sigmoid(0.5 * normal(length, 1, width))
    gate = torch.zeros(length, 1, width) + decay
    beta = (torch.ones(length, 1) if keys == "repeated" else torch.sigmoid(normal(length, 1))).bfloat16()
    begun = 0.1 * normal(1, 1, width, width)
    call: dict[str, Any] = {**narrow, "g": gate, "beta": beta, "state_slots": _ints(0), "cu_seqlens": _ints(0, length)}
    scalars = {"scale": width**-0.5, "l2norm_eps": 1e-6}
    wanted = define("gated_delta_prefill", call | {"state": begun}, scalars)["out"]
    errors = []
    for fn in (gated_delta_prefill, reference.gated_delta_prefill):
        out = fn(**call, state=begun.clone(), **scalars)
        errors.append(float((out.double() - wanted).norm() / wanted.norm()))
    assert errors[0] <= 1.5 * errors[1], f"relative error {errors[0]:.2e}, of the reference {errors[1]:.2e}"


def check_refused() -> None:
    """What the kernels would read wrongly is an error that names the argument; what they cannot do has a reason."""
    cpu = torch.device("cpu")
    assert refusal("gated_delta_decode", cpu, torch.bfloat16, {"K": 512}) == "K must be at most 256, is 512"
    assert convolution.refusal("short_conv_decode", cpu, torch.bfloat16, {"K": 1}) == "K must be 2 to 16, is 1"
    tensors = _tensors(4)
    state = torch.zeros(2, 1, 16, 16)
    wrong: list[tuple[str, dict[str, Tensor], Tensor, int]] = [
        ("chunk_size must be a multiple of 16, is 24", tensors, state, 24),
        ("state must be contiguous float32", tensors, state.transpose(2, 3), 16),
        ("state must be contiguous float32", tensors, state.bfloat16(), 16),
        ("q must have a channel stride", {**tensors, "q": torch.zeros(4, 1, 32)[..., ::2]}, state, 16),
        ("beta must be", {**tensors, "beta": torch.zeros(1, 4)}, state, 16),
    ]
    for words, call, held, chunk_size in wrong:
        try:
            gated_delta_prefill(
                **call, state=held, state_slots=_ints(1), cu_seqlens=_ints(0, 4), scale=1.0, chunk_size=chunk_size
            )
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")


CHECKS: Mapping[str, Callable[..., None]] = {
    "case": check_case,
    "neighbours": check_neighbours,
    "gate": check_gate,
    "cut": check_cut,
    "then_decode": check_then_decode,
    "layouts": check_layouts,
    "far_gates": check_far_gates,
    "convolution_cut": check_convolution_cut,
    "accuracy": check_accuracy,
    "refused": check_refused,
}


if __name__ == "__main__":
    answer_checks(CHECKS)
