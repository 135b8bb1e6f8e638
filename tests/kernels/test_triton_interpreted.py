"""Triton backends judged by their references without a GPU, and the helpers they round with over every code."""

from __future__ import annotations

import pytest

from tests.kernels.check_process import run_checks

CHECKS = (
    "proof:widening",
    "proof:to_bfloat16",
    "proof:to_e4m3",
    "proof:codes_of_bytes",
    "proof:words_under_shifts",
    "hc_pre:one:bfloat16",
    "hc_pre:no_token:bfloat16",
    "hc_pre:four_streams:bfloat16",
    "hc_pre:odd_width:float16",
    "hc_pre:one_round:float32",
    "hc_pre:many_parts:bfloat16",
    "hc_post:tile_plus_1:float16",
    "hc_post:no_token:bfloat16",
    "hc_post:four_streams:bfloat16",
    "hc_post:odd_width:float32",
    "index_pool:one:bfloat16",
    "index_pool:pool_minus_1:float16",
    "index_pool:pool:float32",
    "index_pool:pool_plus_1:bfloat16",
    "index_pool:block:float16",
    "index_pool:block_plus_1:float32",
    "index_pool:continues_pool:bfloat16",
    "index_pool:closes_pool:float16",
    "index_pool:inside_pool:float32",
    "index_pool:last_of_block:bfloat16",
    "index_pool:packed:float16",
    "index_pool:decode:float32",
    "index_pool:some_padding:bfloat16",
    "index_pool:empty_sequence:float16",
    "index_pool:no_token:float32",
    "index_pool:pool_of_1:bfloat16",
    "index_pool:pool_is_block:float16",
    "index_pool:longer_than_a_part:float32",
    "index_pool:pool_of_3:float32",
    "kv_store:packed:bfloat16",
    "kv_store:some_padding:float16",
    "kv_store:all_padding:float32",
    "kv_store:no_token:bfloat16",
    "kv_store:one_column:bfloat16",
    "mxfp4_to_fp8:one_group:float32",
    "mxfp4_to_fp8:odd_group_count:float32",
    "mxfp4_to_fp8:both_edges:float32",
    "mxfp4_to_fp8:no_expert:float32",
    "mxfp4_expert_gemm:one_row:bfloat16",
    "mxfp4_expert_gemm:expert_without_token:bfloat16",
    "mxfp4_expert_gemm:no_token:bfloat16",
    "mxfp4_expert_gemm:odd_group_count:bfloat16",
    "mxfp4_expert_gemm:whole_blocks:bfloat16",
    "mxfp4_expert_gemm:full_tiles:bfloat16",
    "mxfp4_expert_gemm:more_than_a_pass:bfloat16",
    "neighbours:hc_pre:four_streams",
    "neighbours:mxfp4_expert_gemm:expert_without_token",
    "nan:mxfp4_to_fp8",
    "nan:mxfp4_expert_gemm",
    "bfloat16_weight",
    "outlier",
    "extreme_scales",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What is wrong with each check, all made by one process."""
    return run_checks("tests.kernels.triton_interpreted", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str | None]) -> None:
    assert results[check] is None, results[check]
