"""The setting wins; small models take one thread."""

from __future__ import annotations

import pytest

from svc_common.threads import SINGLE_THREAD_WEIGHTS, product_threads


@pytest.mark.parametrize(
    "requested, widest, right",
    [
        (0, 64 * 128, 1),
        (0, SINGLE_THREAD_WEIGHTS - 1, 1),
        (0, SINGLE_THREAD_WEIGHTS, 0),
        (3, 64 * 128, 3),
        (1, 4096 * 12288, 1),
    ],
)
def test_threads(requested: int, widest: int, right: int) -> None:
    assert product_threads(requested, widest) == right
