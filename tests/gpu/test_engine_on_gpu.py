"""The engine on this GPU, captured steps included; `python -m tests.gpu.engine` shows the figures behind it."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.engine import (
    LEAST_GAP,
    MOST_TIMES_UPSTREAM,
    captured,
    embedded,
    golden_prompts,
    layer_errors,
    partings,
)

if not torch.cuda.is_available():
    pytest.skip(f"torch {torch.__version__} sees no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_have_the_tokens_of_the_cpu(dtype: str) -> None:
    gpu = embedded("cuda", dtype)
    # In float32 the experts have their reference alone, which cannot be captured.
    assert bool(captured(gpu)) == (dtype == "bfloat16")
    parted = partings(golden_prompts(), gpu, embedded("cpu"))
    assert all(parting.gap < LEAST_GAP for parting in parted), parted


def test_layers_are_no_further_off_than_upstream_in_bfloat16() -> None:
    errors = layer_errors()
    assert len(errors) == 3
    assert all(error.times <= MOST_TIMES_UPSTREAM for error in errors), errors
