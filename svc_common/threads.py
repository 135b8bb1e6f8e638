"""How many threads one matrix product should use; knows no library."""

from __future__ import annotations

# Below this many weights in its widest matrix, a model's products end before a second thread has woken up; where other
# processes share the cores, waiting for that thread then costs far more than the product.
SINGLE_THREAD_WEIGHTS = 2**20


def product_threads(requested: int, widest_weights: int) -> int:
    """Threads for a model whose widest matrix has `widest_weights` elements; 0 leaves the choice to the library.

    `requested` is the setting: anything but 0 is taken as it is.
    """
    if requested:
        return requested
    return 1 if widest_weights < SINGLE_THREAD_WEIGHTS else 0
