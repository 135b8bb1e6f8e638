"""Definition of the KV store in plain torch; it does not know what a row means."""

from __future__ import annotations

from torch import Tensor

from day0_kernels.spec import Backend

BACKEND = Backend("reference", priority=0)


def kv_store(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes `rows [T, D]` to `cache [S, D]` at `slot_mapping` int32 `[T]`; -1 is skipped."""
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    cache.index_copy_(0, slot_mapping.index_select(0, kept).long(), rows.index_select(0, kept).to(cache.dtype))
