"""Every Triton operator on this GPU, a test a case; `python -m tests.gpu.run` is the same in many processes."""

from __future__ import annotations

import pytest
import torch

from day0.bench.ops.processes import Job
from tests.gpu.run import jobs_of

if not torch.cuda.is_available():
    pytest.skip(f"torch {torch.__version__} sees no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("job", [pytest.param(job, id="-".join((*key, case))) for key, case, job in jobs_of([])])
def test_right_repeatable_and_captured(job: Job) -> None:
    refused = job.fn(*job.arguments)
    if refused is not None:
        pytest.skip(f"refused: {refused}")
