"""What every operator test runs under: one thread, no gradients, and uninitialised memory full of NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and friends return NaN (integers their largest value), so that what is never written is seen."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
