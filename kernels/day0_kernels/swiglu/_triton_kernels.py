"""Device code of the gate between an expert's two products: float32 values, and the same quantised to e4m3."""

from __future__ import annotations

import triton
import triton.language as tl

from day0_kernels.triton_rounding import e4m3_of, float32_of, rounded_to


@triton.jit
def _gated(gate, up, limit, alpha, up_offset, LIMITED: tl.constexpr):
    # Comparisons keep a NaN where minimum and maximum would drop it.
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * (1.0 / (1.0 + tl.exp(-alpha * gate))) * (up + up_offset)


@triton.jit
def gate_kernel(gate_up, out, limit, alpha, up_offset, F: tl.constexpr, LIMITED: tl.constexpr, BLOCK_F: tl.constexpr):
    """`BLOCK_F` columns of a row of `gate_up [N, 2 F]` -> `out [N, F]`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    at = gate_up + row * (2 * F) + columns
    gate = float32_of(tl.load(at, mask=columns < F, other=0.0))
    up = float32_of(tl.load(at + F, mask=columns < F, other=0.0))
    held = _gated(gate, up, limit, alpha, up_offset, LIMITED)
    tl.store(out + row * F + columns, rounded_to(held, out.dtype.element_ty), mask=columns < F)


@triton.jit
def gate_fp8_kernel(
    gate_up, values, scales, limit, alpha, up_offset, F: tl.constexpr, LIMITED: tl.constexpr, GROUPS: tl.constexpr
):
    """`GROUPS` groups of 128 columns of a row of `gate_up [N, 2 F]` -> e4m3 `values [N, F]`, `scales [N, F / 128]`."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = gate_up + row * (2 * F) + columns
    gate = float32_of(tl.load(at, mask=columns < F, other=0.0))
    up = float32_of(tl.load(at + F, mask=columns < F, other=0.0))
    held = _gated(gate, up, limit, alpha, up_offset, LIMITED)
    # The order of magnitudes is that of their bits, and there a NaN is the largest.
    peak = tl.max(held.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.where(peak == 0.0, 1.0, tl.div_rn(peak, tl.full((GROUPS,), 448.0, tl.float32)))
    code = e4m3_of(held * tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), scale)[:, None])
    tl.store(values + row * F + columns, code, mask=columns < F)
    tl.store(scales + row * (F // 128) + groups, scale, mask=groups < F // 128)
