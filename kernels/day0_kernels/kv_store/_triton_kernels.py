"""Device code of the KV store."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import float32_of, rounded_to


@triton.jit(do_not_specialize=["T"])
def store_kernel(
    rows, cache, slot_mapping, T, D: tl.constexpr, D_PAD: tl.constexpr, SAME: tl.constexpr, BLOCK_T: tl.constexpr
):
    """`cache[slot_mapping[t]] = rows[t]` for `BLOCK_T` tokens; a negative slot writes nothing."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, D_PAD)
    slots = tl.load(slot_mapping + tokens, mask=tokens < T, other=-1).to(tl.int64)
    kept = (slots >= 0)[:, None] & (columns < D)[None, :]
    held = tl.load(rows + tokens.to(tl.int64)[:, None] * D + columns[None, :], mask=kept, other=0.0)
    if not SAME:
        held = rounded_to(float32_of(held), cache.dtype.element_ty)
    tl.store(cache + slots[:, None] * D + columns[None, :], held, mask=kept)
