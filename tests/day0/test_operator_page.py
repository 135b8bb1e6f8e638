"""The page of operator figures: what is compared with what, which goals are reached, and what is rewritten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.operator_goals import Bound, goal_of
from benchmarks.operator_page import BEGIN, END, PAGE, checks, rewritten, table
from day0.bench.ops.row import OURS, Row

OUR_ROW = Row("gated_delta", "gated_delta_prefill", "KDA 64 heads, 4k", OURS, floor_us=100, us=400, error=1.7e-3)
FLA = replace(OUR_ROW, who="fla 0.6.0 chunk_kda", us=900.0, note="bf16 gates")
FLASH = replace(OUR_ROW, who="flash_kda 0.0.1 fwd", us=None, wrong="RuntimeError: a | b")


def document(*rows: Row, device: str = "NVIDIA H200") -> dict[str, object]:
    rates = {f"{name}_per_second": 4e12 for name in ("copy_bytes", "read_bytes", "bf16_flops", "fp8_flops")}
    return {"about": {"device": device}, "ceilings": rates, "rows": [row.to_json() for row in rows]}


def line(*documents: dict[str, object]) -> list[str]:
    """Cells of the only row."""
    last = table(documents).splitlines()[-1].replace("\\|", "/")
    return [cell.strip() for cell in last.strip("|").split("|")]


def test_a_row_has_its_figures_goals_and_peers() -> None:
    assert line(document(OUR_ROW, FLA, FLASH)) == [
        "gated_delta_prefill",
        "KDA 64 heads, 4k",
        "400.0",
        "100.0",
        "bytes",
        "25 %",
        "",
        "1.7e-03",
        "1.2x chunk_kda: **yes**",
        "2.5x chunk_kda: no<br>1x flash_kda: no peer",
        "fla 0.6.0 chunk_kda: 900.0 µs (2.25x, bf16 gates)<br>flash_kda 0.0.1 fwd: RuntimeError: a / b",
    ]


def test_a_peer_is_compared_with_our_time_in_its_own_run() -> None:
    later = replace(OUR_ROW, us=500.0)
    found = line(document(OUR_ROW), document(later, FLA))
    assert found[2] == "400.0"
    assert found[-1] == "fla 0.6.0 chunk_kda: 900.0 µs (1.80x, bf16 gates)"


def test_a_peer_timed_in_one_version_is_not_also_untimed_in_another() -> None:
    timed = replace(FLASH, who="flash_kda 0.0.2 fwd", us=600.0, wrong=None)
    found = line(document(OUR_ROW, FLASH), document(OUR_ROW, timed))
    assert found[-1] == "flash_kda 0.0.2 fwd: 600.0 µs (1.50x)" == line(document(OUR_ROW, timed, FLASH))[-1]


def test_what_is_wrong_has_no_figures() -> None:
    found = line(document(replace(OUR_ROW, us=None, wrong="error 1.0e+00 above 2.5e-03"), FLA))
    assert found[2:7] == ["error 1.0e+00 above 2.5e-03", "", "", "", ""]
    assert found[8] == "1.2x chunk_kda: no"


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        (Bound("share", 25), True),
        (Bound("share", 25.1), False),
        (Bound("us", 400), True),
        (Bound("us", 399), False),
        (Bound("tflops", 1), False),
        (Bound("times", 2.25, ("chunk_kda",)), True),
        (Bound("times", 2.26, ("chunk_kda",)), False),
        (Bound("times", 3.0, ("chunk_kda", "other")), True),
        (Bound("times", 3.1, ("chunk_kda", "other")), False),
        (Bound("times", 1.0, ("flash_kda",)), None),
    ],
)
def test_a_bound_is_reached_from_its_value_on(bound: Bound, reached: bool | None) -> None:
    other = replace(FLA, who="other 1.0", us=300.0)
    assert bound.reached(OUR_ROW, [FLA, FLASH, other, replace(other, us=310.0)]) is reached


def test_the_checks_are_counted_and_what_is_wrong_is_named() -> None:
    rows = [
        {"operator": "hc_pre", "dtype": "bfloat16", "right": 9, "refused": {}, "not_reached": 0, "wrong": []},
        {
            "operator": "swiglu",
            "dtype": "float16",
            "right": 1,
            "refused": {"odd": 2},
            "not_reached": 3,
            "wrong": ["a|b"],
        },
        {"operator": "kv_store", "dtype": "float16", "right": 0, "refused": {}, "not_reached": 4, "wrong": []},
        {"operator": "hc_pre", "dtype": "float16", "right": 0, "refused": {}, "not_reached": 9, "wrong": []},
        {"operator": "hc_post", "dtype": "float16", "right": 0, "refused": {"dtype": 9}, "not_reached": 0, "wrong": []},
    ]
    found = checks({"device": "NVIDIA H200", "torch": "2.11.0", "seconds": 61.2, "rows": rows})
    assert "10 cases of 4 operators right, 1 wrong, 11 refused with a reason, 16 not reached, in 61 s" in found
    assert found.splitlines()[1:] == [
        "  - swiglu, float16: a\\|b; 3 cases not reached",
        "  - float16: no case reached of kv_store, hc_pre",
    ]


def test_only_what_is_between_the_marks_is_rewritten() -> None:
    assert rewritten(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    with pytest.raises(ValueError, match="the page has no"):
        rewritten("a\n", "new")
    page = PAGE.read_text()
    assert rewritten(page, "new").startswith(page.partition(BEGIN)[0])


@pytest.mark.parametrize(
    ("operator", "shape", "must"),
    [
        ("fp8_index_select_decode", "32 heads, 128k, batch 32", "75 % of the floor"),
        ("fp8_index_select_decode", "32 heads, 128k, batch 32, pools of 16", None),
        ("fp8_index_select_prefill", "32 heads, 4k x 128k", "1x fp8_mqa_logits + top_k_ragged_transform"),
        ("sparse_mla_decode", "GLM 64k, batch 1", "20 µs"),
        ("fp8_sparse_mla_decode", "GLM 64k, batch 128", "110 µs"),
        ("sparse_mla_decode", "16 heads of DSV3.2 64k, batch 128", None),
        ("sparse_mla_prefill", "DSV3.2 4k x 64k", "350 TFLOP/s"),
        ("gated_delta_prefill", "KDA 64 heads, 8k", "1.2x chunk_kda"),
        ("gated_delta_prefill", "KDA 64 heads, 8 x 1k", None),
        ("gated_delta_decode", "KDA 64 heads, batch 128", "75 % of the floor"),
        ("mxfp4_expert_gemm", "GLM down, 32 tokens", "70 % of the floor"),
        ("mxfp4_fp8_expert_gemm", "GLM up, 4,096 tokens", "2x triton_kernels"),
        ("fp8_expert_product", "GLM up, 4,096 tokens", "0.7x m_grouped contiguous"),
        ("mxfp4_to_fp8", "288 experts of 4096 x 4096", "85 % of the floor"),
        ("hc_pre_norm", "4,096 tokens", "65 % of the floor"),
        ("attention_residual", "4,096 tokens, 9 sources of 7168", "65 % of the floor"),
        ("attention_residual", "128 tokens, 9 sources of 4096", None),
    ],
)
def test_goals_are_of_the_rows_they_name(operator: str, shape: str, must: str | None) -> None:
    goal = goal_of(replace(OUR_ROW, operator=operator, shape=shape))
    assert (goal and str(goal.must[0])) == must
