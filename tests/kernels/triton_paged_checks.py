"""Checks of attention over FP8 latents and over whole paged sequences under Triton's interpreter, a line of JSON each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_paged_checks`), because Triton decides when it
is imported whether it interprets. `test_triton_paged.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from day0_kernels import registry
from day0_kernels.comparison import compare, judge_backend, run, same_bits
from day0_kernels.fp8_sparse_mla import reference as fp8_reference
from day0_kernels.fp8_sparse_mla import triton as fp8_sparse_mla
from day0_kernels.inputs import make_inputs
from day0_kernels.paged_attention import reference as paged_reference
from day0_kernels.paged_attention import triton as paged
from day0_kernels.spec import Case, Tolerance
from tests.kernels.check_process import answer_checks
from tests.kernels.parts import parts_of, pick

MODULES = {
    "fp8_sparse_mla": (fp8_sparse_mla, fp8_reference),
    "paged_mla": (paged, paged_reference),
    "paged_gqa": (paged, paged_reference),
}
_FP8 = {"block_size": 16, "softmax_scale": 0.1, "value_dim": 128}
# Beside the specs' own: more positions than a run, a tail behind a full list, heads beyond a tile, many sequences, and
# blocks that are no multiple of a tile or a multiple of it.
CASES: Mapping[tuple[str, str], Case] = {
    ("fp8_sparse_mla_decode", "runs"): Case(
        "runs",
        {"H": 3, "R": 136, "V": 128, "W": 790, "num_blocks": 170, "block_size": 16},
        (1,) * 5,
        tuple(length - 1 for length in (1, 415, 417, 800, 0)),
        _FP8,
    ),
    ("fp8_sparse_mla_decode", "many_heads"): Case(
        "many_heads",
        {"H": 65, "R": 192, "V": 128, "W": 129, "num_blocks": 16, "block_size": 16},
        (1, 1),
        (63, 128),
        _FP8,
    ),
    ("fp8_sparse_mla_prefill", "many_sequences"): Case(
        "many_sequences",
        {"H": 2, "R": 136, "V": 128, "W": 9, "num_blocks": 16, "block_size": 16},
        tuple({0: 2, 100: 1, 255: 3, 256: 2, 257: 1}.get(b, 0) for b in range(258)),
        tuple({0: 3, 255: 16}.get(b, 0) for b in range(258)),
        _FP8,
    ),
    ("paged_mla_decode", "runs"): Case(
        "runs",
        {"H": 65, "R": 80, "V": 64, "num_blocks": 24, "block_size": 24},
        (1,) * 4,
        tuple(length - 1 for length in (64, 65, 150, 0)),
        {"block_size": 24, "softmax_scale": 0.1, "value_dim": 64},
    ),
    ("paged_gqa_decode", "runs"): Case(
        "runs",
        {"H": 6, "HKV": 2, "D": 64, "num_blocks": 24, "block_size": 64},
        (1,) * 5,
        tuple(length - 1 for length in (64, 65, 640, 700, 0)),
        {"block_size": 64, "softmax_scale": 0.1},
    ),
    ("paged_gqa_decode", "wide"): Case(
        "wide",
        {"H": 1, "HKV": 1, "D": 256, "num_blocks": 4, "block_size": 32},
        (1, 1),
        (30, 64),
        {"block_size": 32, "softmax_scale": 0.1},
    ),
}


def _operator(name: str) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Operator, our function and the reference's."""
    ours, reference = MODULES[name.rsplit("_", 1)[0]]
    return registry.operator(name), getattr(ours, name), getattr(reference, name)


def _case(name: str, case: str) -> Case:
    return CASES.get((name, case)) or next(one for one in registry.operator(name).cases if one.name == case)


def check_case(name: str, case: str, dtype: str, seed: str = "0") -> None:
    """Right within the spec's tolerance and the same bits twice; a seed of one has blocks at the other edge first."""
    operator, fn, reference = _operator(name)
    inputs = make_inputs(operator, _case(name, case), seed=int(seed), dtype=getattr(torch, dtype))
    judge_backend(operator, fn, reference, inputs)


def check_neighbours(name: str, case: str) -> None:
    """Each sequence alone has the bits it has among the others."""
    operator, fn, _ = _operator(name)
    found = _case(name, case)
    inputs = make_inputs(operator, found, seed=3, dtype=torch.bfloat16)
    whole = run(operator, fn, inputs)
    for b in range(parts_of(operator, found)):
        picked, rows = pick(operator, inputs, [b])
        for key, result in run(operator, fn, picked).items():
            assert same_bits(result, whole[key][rows]), f"{key} of sequence {b}"


def check_codes() -> None:
    """Every e4m3 code is the value it stands for, NaN too: a head that reads one column has that column's mean."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    cache = torch.zeros(2, 132, dtype=torch.uint8)
    cache[:, :128], cache[:, 128:] = codes, torch.tensor([[0.75], [3.0]]).view(torch.uint8)
    call: dict[str, Any] = {
        "q": torch.zeros(2, 1, 128),
        "cache": cache,
        "topk_indices": torch.tensor([[0], [1]], dtype=torch.int32),
        "block_table": torch.tensor([[0], [0]], dtype=torch.int32),
    }
    scalars: dict[str, Any] = {"block_size": 16, "softmax_scale": 1.0, "value_dim": 128}
    finite = codes & 0x7F != 0x7F
    # NaN logits would hide the rest: first without the NaN codes, then they alone.
    call["cache"] = cache.clone()
    call["cache"][:, :128][~finite] = 0
    got = fp8_sparse_mla.fp8_sparse_mla_decode(**call, **scalars)[:, 0]
    wanted = codes.view(torch.float8_e4m3fn).float() * torch.tensor([[0.75], [3.0]])
    assert torch.equal(got[finite], wanted[finite]), (got - wanted)[finite].abs().max()
    broken = fp8_sparse_mla.fp8_sparse_mla_decode(**{**call, "cache": cache}, **scalars)
    assert bool(broken.isnan().all(2).all()), "a NaN code of a key is lost"


def check_prefill_is_decode() -> None:
    """A token of a packed call has what a decode of its sequence has."""
    operator = registry.operator("fp8_sparse_mla_prefill")
    inputs = make_inputs(operator, _case("fp8_sparse_mla_prefill", "packed"))
    tensors: dict[str, Any] = dict(inputs.tensors)
    got = fp8_sparse_mla.fp8_sparse_mla_prefill(**tensors, **inputs.scalars)
    bounds = tensors.pop("cu_seqlens").tolist()
    for b, (_, end) in enumerate(pairwise(bounds)):
        row = slice(end - 1, end)
        call = {**tensors, "q": tensors["q"][row], "topk_indices": tensors["topk_indices"][row]}
        call["block_table"] = tensors["block_table"][b : b + 1]
        alone = fp8_sparse_mla.fp8_sparse_mla_decode(**call, **inputs.scalars)
        compared = compare("out", got[row], alone, Tolerance({"float32": 1e-6}, {"float32": 1e-6}))
        assert compared.within, compared


def _refused(fn: Callable[..., Any], call: Mapping[str, Any], said: str) -> None:
    try:
        fn(**call)
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"not refused: {said}")


def check_refused() -> None:
    """What the kernels cannot do has a reason, what they would read wrongly is an error that names it."""
    cpu, refusal = torch.device("cpu"), fp8_sparse_mla.refusal
    with mock.patch.object(fp8_sparse_mla, "device_refusal", lambda device: None):
        assert refusal("fp8_sparse_mla_decode", cpu, torch.bfloat16, {"H": 128, "V": 512, "R": 576}) is None
        assert refusal("fp8_sparse_mla_decode", cpu, torch.bfloat16, {"V": 512, "R": 512}) is None
        for sizes, said in (
            ({"H": 129}, "H must be at most 128, is 129"),
            ({"V": 384}, "value_dim must be one of 128, 256, 512, is 384"),
            ({"V": 512, "R": 578}, "R must be an even number, value_dim to value_dim + 64, is 578 with 512"),
        ):
            assert refusal("fp8_sparse_mla_decode", cpu, torch.bfloat16, sizes) == said
    operator = registry.operator("fp8_sparse_mla_decode")
    inputs = make_inputs(operator, _case("fp8_sparse_mla_decode", "one"))
    cache = inputs.tensors["cache"]
    for sizes, said in (
        ({"H": 17, "HKV": 1, "D": 64}, "H must be 1 to 16 times HKV, is 17 with HKV 1"),
        ({"H": 5, "HKV": 2, "D": 64}, "H must be 1 to 16 times HKV, is 5 with HKV 2"),
        ({"D": 80}, "D must be one of 64, 128, 256, is 80"),
    ):
        assert paged.refusal("paged_gqa_decode", cpu, torch.bfloat16, sizes) == said
    beyond = paged.refusal("paged_mla_decode", cpu, torch.bfloat16, {"R": 600, "V": 512})
    assert beyond == "R must be value_dim to value_dim + 64, is 600 with value_dim 512"
    for name, argument in (("paged_mla_decode", "latents"), ("paged_gqa_decode", "value_cache")):
        made = make_inputs(registry.operator(name), _case(name, "one"))
        call = {**made.tensors, argument: made.tensors[argument].bfloat16(), **made.scalars}
        _refused(getattr(paged, name), call, f"{argument} must be contiguous torch.float32 [slots, ")
    for wrong in (cache.float(), cache[:, :-2], cache.repeat(1, 2)[:, ::2]):
        call = {**inputs.tensors, "cache": wrong, **inputs.scalars}
        _refused(fp8_sparse_mla.fp8_sparse_mla_decode, call, "cache must be contiguous torch.uint8 [slots, 148]")


CHECKS: Mapping[str, Callable[..., None]] = {
    "case": check_case,
    "neighbours": check_neighbours,
    "codes": check_codes,
    "prefill_is_decode": check_prefill_is_decode,
    "refused": check_refused,
}


if __name__ == "__main__":
    # Sequences of some hundred tokens, and more runs than the join takes at a time.
    with mock.patch.object(paged, "RUN_POSITIONS", 64):
        answer_checks(CHECKS)
