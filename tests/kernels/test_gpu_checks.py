"""What is checked on a GPU can fail: each check against functions that are wrong in one way, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from day0.bench.ops.processes import Answer
from day0_kernels import registry
from day0_kernels.comparison import Mismatch
from day0_kernels.inputs import make_inputs
from tests.gpu import run
from tests.gpu.checks import DTYPES, ROUNDING, check_neighbours, dtypes_of, triton_operators
from tests.gpu.more_cases import MORE_CASES, cases
from tests.kernels.triton_proofs import PROOFS


def neighbours(name: str, case_name: str, fn: Callable[..., Any]) -> None:
    operator = registry.operator(name)
    case = next(one for one in cases(name) if one.name == case_name)
    check_neighbours(operator, fn, make_inputs(operator, case, seed=1), case)


def reference(name: str) -> Callable[..., Any]:
    return registry.resolve(name, "cpu", torch.float32, "reference").fn


@pytest.mark.parametrize(
    ("name", "case"),
    [("hc_post", "tile_plus_1"), ("gated_delta_prefill", "packed"), ("mxfp4_expert_gemm", "first_and_last")],
)
def test_a_result_without_regard_to_neighbours_passes(name: str, case: str) -> None:
    neighbours(name, case, reference(name))


def test_a_row_that_feels_its_neighbours_is_seen() -> None:
    def felt(streams: Tensor, **rest: Any) -> Tensor:
        mixed: Tensor = reference("hc_post")(streams=streams, **rest)
        return mixed + 1e-6 * len(streams)

    with pytest.raises(Mismatch, match="of 1 of 17 parts has other bits"):
        neighbours("hc_post", "tile_plus_1", felt)


def test_a_cache_that_feels_the_other_sequences_is_seen() -> None:
    def felt(state: Tensor, state_slots: Tensor, **rest: Any) -> Tensor:
        out: Tensor = reference("gated_delta_prefill")(state=state, state_slots=state_slots, **rest)
        state[state_slots[0].long()] += 1e-6 * len(state_slots)
        return out

    with pytest.raises(Mismatch, match=r"(out|state) "):
        neighbours("gated_delta_prefill", "packed", felt)


def test_every_case_of_every_triton_operator_is_a_job_and_bfloat16_comes_first() -> None:
    jobs = run.jobs_of([])
    asked = {(name, dtype, case) for (name, dtype), case, _ in jobs}
    assert len(asked) == len(jobs)
    wanted = {
        (name, dtype, case.name) for name in triton_operators() for dtype in dtypes_of(name) for case in cases(name)
    }
    assert asked == wanted | {(ROUNDING, "all codes", proof) for proof in PROOFS}
    order = [DTYPES.index(dtype) for (_, dtype), _, _ in jobs if dtype in DTYPES]
    assert order == sorted(order)
    assert set(MORE_CASES) <= {one.name for one in registry.operators()}


def test_only_takes_parts_of_names() -> None:
    assert {key[0] for key, _, _ in run.jobs_of(["hc_post", "v_stor"])} == {"hc_post", "kv_store"}


def test_a_tally_counts_right_refused_wrong_and_what_was_not_reached() -> None:
    tally = run.Tally(asked=5)
    cut = Answer(None, "stopped after 1 s", cut=True)
    for answer in (Answer(), Answer("dtype float16 is not among bfloat16"), Answer(None, "Mismatch: out[0] is 1"), cut):
        run.add(tally, "one", answer)
    line = run.line_of(("hc_pre", "float16"), tally)
    for words in ("1 right", "1 wrong", "1 refused (dtype float16 is not among bfloat16)", "2 not reached"):
        assert words in line
    assert tally.wrong == ["one: Mismatch: out[0] is 1"]


def test_an_operator_that_refuses_everything_counts_as_unchecked() -> None:
    refusing, right = run.Tally(asked=1), run.Tally(asked=1)
    run.add(refusing, "one", Answer("needs another GPU"))
    run.add(right, "one", Answer())
    assert run.unchecked([(("a", "bfloat16"), refusing), (("b", "bfloat16"), right)]) == ["a"]
    assert run.unchecked([(("a", "bfloat16"), refusing), (("a", "float16"), right)]) == []


def test_without_a_gpu_nothing_is_checked_and_that_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run.main([]) == 1
    assert "sees no CUDA device" in capsys.readouterr().err
