"""Checks of FP8 experts and of what surrounds them under Triton's interpreter, a line of JSON for each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_expert_checks`), because Triton decides when it
is imported whether it interprets. `test_triton_experts.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from day0_kernels import registry
from day0_kernels.comparison import judge_backend, run, same_bits
from day0_kernels.expert_routing import triton as routing
from day0_kernels.inputs import Inputs, make_inputs
from day0_kernels.spec import Case
from tests.kernels.check_process import answer_checks
from tests.kernels.parts import parts_of, pick

FOLDERS = {
    "fp8_expert_product": "fp8_expert_product",
    "fp8_expert_gemm": "fp8_expert_gemm",
    "select_experts": "expert_routing",
    "permute_rows": "expert_routing",
    "unpermute_rows": "expert_routing",
    "swiglu": "swiglu",
    "swiglu_fp8": "swiglu",
}
_GLM = {"score": "sigmoid", "top_k": 3, "groups": 1, "topk_groups": 1, "normalise": True, "scaling": 2.5}
# Beside the specs' own, one for each configuration: rows enough for the larger tiles.
CASES: Mapping[str, Case] = {
    "large_tiles": Case("large_tiles", {"Din": 272, "Dout": 300}, expert_rows=(129, 0, 60)),
    "middle_tiles": Case("middle_tiles", {"Din": 144, "Dout": 132}, expert_rows=(65, 0, 64)),
    "column_edges": Case("column_edges", {"Din": 144, "Dout": 132}, expert_rows=(1, 0, 19)),
    "deep_blocks": Case("deep_blocks", {"Din": 4240, "Dout": 3}, expert_rows=(1, 0)),
    "many_chunks": Case("many_chunks", {"K": 8, "E": 6, "D": 3}, (40,), (0,), {"experts": 6}),
    "many_bins": Case("many_bins", {"K": 2, "E": 600, "D": 3}, (70,), (0,), {"experts": 600}),
}


def function(name: str, backend: str) -> Callable[..., Any]:
    """A backend's function, whatever it would say about the device."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"day0_kernels.{FOLDERS[name]}.{backend}"), name)
    return found


def _case(name: str, case: str) -> Case:
    return CASES.get(case) or next(one for one in registry.operator(name).cases if one.name == case)


def check_case(name: str, case: str, dtype: str) -> None:
    """Right within the spec's tolerance, and the same bits twice."""
    inputs = make_inputs(registry.operator(name), _case(name, case), dtype=getattr(torch, dtype))
    # Small chunks: many of them without many tokens.
    with mock.patch.object(routing, "_CHUNK", 16):
        judge_backend(registry.operator(name), function(name, "triton"), function(name, "reference"), inputs)


def check_neighbours(name: str, case: str) -> None:
    """The last row alone has the bits it has among the others."""
    operator, found = registry.operator(name), _case(name, case)
    inputs = make_inputs(operator, found, seed=3, dtype=torch.bfloat16)
    whole = run(operator, function(name, "triton"), inputs)
    alone, rows = pick(operator, inputs, [parts_of(operator, found) - 1])
    for key, result in run(operator, function(name, "triton"), Inputs(alone.tensors, inputs.scalars)).items():
        assert same_bits(result, whole[key][rows]), key


def _selections(logits: Tensor, bias: Tensor, **scalars: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    got, want = (
        function("select_experts", backend)(logits, bias, **_GLM | scalars) for backend in ("triton", "reference")
    )
    return got, want


def check_ties() -> None:
    """Equal choices go to the lowest id, those of both zeros too, and equal groups are taken in order."""
    logits = torch.tensor([[0.0, -0.0] * 6, [1.0, 2.0, 2.0, 1.0] * 3, [-torch.inf] * 12, [torch.inf] * 12])
    bias = torch.tensor([-0.5, -0.5, -0.5]).repeat(4)
    for scalars in ({}, {"groups": 4, "topk_groups": 2, "top_k": 5}, {"groups": 4, "topk_groups": 1, "top_k": 5}):
        (ids, weights), (wanted, wanted_weights) = _selections(logits, bias, **scalars)
        assert torch.equal(ids, wanted), (scalars, ids, wanted)
        torch.testing.assert_close(weights, wanted_weights, equal_nan=True)
    assert wanted.tolist()[0] == [0, 1, 2, 3, 4]


def check_not_a_number() -> None:
    """NaN is the largest: the ids stay distinct and legal, the weights say NaN."""
    logits = torch.zeros(4, 10)
    logits[1], logits[2, 7], logits[3, 9] = torch.nan, torch.nan, -torch.nan
    for score in ("sigmoid", "softmax", "sqrt_softplus"):
        for groups in (1, 5):
            scalars = {"score": score, "groups": groups, "topk_groups": 1 if groups == 1 else 2}
            (ids, weights), (wanted, wanted_weights) = _selections(logits, torch.zeros(10), **scalars)
            assert torch.equal(ids, wanted), (scalars, ids, wanted)
            assert torch.equal(weights.isnan(), wanted_weights.isnan()), (scalars, weights)
            assert [len(set(row)) for row in ids.tolist()] == [3] * 4
            assert weights[1].isnan().all() and weights[2].isnan().any() and weights[0].isfinite().all()


def check_extremes() -> None:
    """Logits far from zero: scores of 0 and 1, and small ones without a loss of digits."""
    logits = torch.tensor([[-200.0, -80.0, -30.0, -10.0, -0.01, 0.01, 10.0, 30.0, 80.0, 200.0]])
    for score in ("sigmoid", "softmax", "sqrt_softplus"):
        scalars = {"score": score, "top_k": 10, "normalise": False, "scaling": 1.0}
        (ids, weights), (wanted, wanted_weights) = _selections(logits, torch.zeros(10), **scalars)
        assert torch.equal(ids, wanted), (score, ids, wanted)
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=0)


def check_quantised(limit: str) -> None:
    """No value is farther from the exact one than half a step of e4m3, clamped or not; the largest is 448."""
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(1))
    x[1], x[2, :128], x[3, 5] = 0.0, 0.0, 1e4
    scalars = {"limit": None if limit == "none" else float(limit), "alpha": 1.0, "up_offset": 0.0}
    values, scales = function("swiglu_fp8", "triton")(x, **scalars)
    exact = function("swiglu", "reference")(x, **scalars).double().view(6, 2, 128)
    codes = values.view(torch.float8_e4m3fn).double().view(6, 2, 128)
    wanted = exact / scales.double().unsqueeze(-1)
    step = 2.0 ** (wanted.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert ((codes - wanted).abs() <= 0.5 * step + 1e-5 * wanted.abs()).all()
    assert (codes.abs().amax(-1)[exact.abs().amax(-1) > 0] == 448).all()
    assert (scales[1] == 1).all() and float(scales[2, 0]) == 1


def check_gate_not_a_number() -> None:
    """A NaN, in gate or up, passes every clamp and stays where it is; quantised, it takes its group with it."""
    for limit in (None, 0.5):
        x = torch.ones(3, 512)
        x[0, 3], x[1, 256 + 200] = torch.nan, torch.nan
        scalars = {"limit": limit, "alpha": 1.0, "up_offset": 0.0}
        out = function("swiglu", "triton")(x, **scalars)
        assert out.isnan().nonzero().tolist() == [[0, 3], [1, 200]]
        values, scales = function("swiglu_fp8", "triton")(x, **scalars)
        assert scales.isnan().nonzero().tolist() == [[0, 0], [1, 1]]
        spoiled = values.view(torch.float8_e4m3fn).float().isnan().view(3, 2, 128)
        assert torch.equal(spoiled, scales.isnan().unsqueeze(-1).expand(-1, -1, 128))


def check_product_not_a_number(name: str) -> None:
    """A NaN scale is in the outputs it reaches and in no others; the interpreter takes the code of NaN for 480."""
    rows = (1, 2) if name == "fp8_expert_gemm" else (17, 30)
    case = Case("nan", {"Din": 144, "Dout": 132}, expert_rows=rows)
    inputs = make_inputs(registry.operator(name), case, dtype=torch.bfloat16).copy()
    inputs.tensors["block_scales"][0, 1, 0] = torch.nan
    if name == "fp8_expert_product":
        inputs.tensors["x_scales"][2, 1] = torch.nan
    out = function(name, "triton")(**inputs.tensors)
    wanted = function(name, "reference")(**inputs.tensors)
    assert torch.equal(out.isnan(), wanted.isnan()), (out.isnan() != wanted.isnan()).nonzero()[:5]
    assert out.isnan().any() and not out.isnan().all()


def check_terms() -> None:
    """Every bfloat16 of seven neighbouring exponents is two e4m3 terms, exactly: an identity weight gives it back."""
    bits = torch.arange(0x4000, 0x4000 + 7 * 128).view(7, 128)
    x = torch.cat([bits, bits | 0x8000]).to(torch.int32).bitwise_left_shift(16).view(torch.float32).to(torch.bfloat16)
    weight = torch.eye(128).to(torch.float8_e4m3fn).view(torch.uint8)[None]
    offsets = torch.tensor([0, len(x)], dtype=torch.int32)
    got = function("fp8_expert_gemm", "triton")(x, weight, torch.ones(1, 1, 1), offsets)
    assert same_bits(got, x), (got - x).abs().amax()


def check_outlier() -> None:
    """Beside a column 2^30 times larger, others keep 2^-17 of it; in the next 128 columns they keep all they have."""
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    x[0, 5] = 2.0**30
    weight = torch.zeros(1, 3, 256)
    weight[0, 0, 5], weight[0, 1, 6], weight[0, 2, 200] = 1, 1, 1
    bits = weight.to(torch.float8_e4m3fn).view(torch.uint8)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    out = function("fp8_expert_gemm", "triton")(x, bits, torch.ones(1, 1, 2), offsets)[0].tolist()
    assert out[0] == 2.0**30 and abs(out[1] - 1) <= 2.0**13 and out[2] == 1, out


def check_rows_at_places() -> None:
    """An output row at a place of -1 adds nothing, not even with a NaN for a weight."""
    rows = torch.tensor([[1.0, 2.0], [torch.nan, 4.0]])
    weights = torch.tensor([[0.5, torch.nan], [torch.nan, torch.nan]])
    places = torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32)
    assert function("unpermute_rows", "triton")(rows, weights, places).tolist() == [[0.5, 1.0], [0.0, 0.0]]


def check_refused() -> None:
    """What the kernels cannot do has a reason, what they would do wrongly is an error that names it."""
    cpu = torch.device("cpu")
    for name, sizes, reason in (
        ("fp8_expert_product", {"Din": 24}, "Din must be a multiple of 16, is 24"),
        ("fp8_expert_product", {"E": 4097}, "E must be at most 4096, is 4097"),
        ("fp8_expert_product", {"E": 4096, "Dout": 2**20}, "E * Dout must be at most 2147483647, is 4294967296"),
        ("select_experts", {"E": 4096}, "E must be at most 4095, is 4096"),
        ("permute_rows", {"K": 65}, "K must be at most 64, is 65"),
        ("swiglu_fp8", {"F": 100}, "F must be a multiple of 128, is 100"),
    ):
        module = importlib.import_module(f"day0_kernels.{FOLDERS[name]}.triton")
        assert module.refusal(name, cpu, torch.bfloat16, sizes) == reason, module.refusal(
            name, cpu, torch.bfloat16, sizes
        )
    for scalars, message in (
        ({"top_k": 11}, "top_k must be 1 to 10, the number of experts, is 11"),
        ({"groups": 3}, "groups must divide 10 experts into groups of 2 or more, is 3"),
        ({"groups": 10}, "groups must divide 10 experts into groups of 2 or more, is 10"),
        ({"groups": 5, "topk_groups": 6}, "topk_groups must be 1 to 5, the number of groups, is 6"),
        ({"score": "linear"}, "score must be sigmoid, softmax, sqrt_softplus, is 'linear'"),
    ):
        try:
            function("select_experts", "triton")(torch.zeros(1, 10), torch.zeros(10), **_GLM | scalars)
        except ValueError as error:
            assert str(error) == message, error
        else:
            raise AssertionError(f"{scalars} was accepted")


KINDS: dict[str, Callable[..., None]] = {
    "case": check_case,
    "neighbours": check_neighbours,
    "ties": check_ties,
    "not_a_number": check_not_a_number,
    "extremes": check_extremes,
    "quantised": check_quantised,
    "gate_not_a_number": check_gate_not_a_number,
    "product_not_a_number": check_product_not_a_number,
    "terms": check_terms,
    "outlier": check_outlier,
    "rows_at_places": check_rows_at_places,
    "refused": check_refused,
}

if __name__ == "__main__":
    answer_checks(KINDS)
