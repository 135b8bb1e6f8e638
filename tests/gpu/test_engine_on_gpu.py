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


def test_captured_steps_have_the_tokens_of_the_cpu() -> None:
    gpu = embedded("cuda")
    assert captured(gpu) > 0
    parted = partings(golden_prompts(), gpu, embedded("cpu"))
    assert all(parting.gap < LEAST_GAP for parting in parted), parted


def test_layers_are_no_further_off_than_upstream_in_bfloat16() -> None:
    errors = layer_errors()
    assert len(errors) == 3
    assert all(error.times <= MOST_TIMES_UPSTREAM for error in errors), errors
