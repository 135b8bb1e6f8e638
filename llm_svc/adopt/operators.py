"""The operators an adopted family calls, each resolved to one backend when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from day0_kernels import registry


@dataclass(frozen=True, slots=True)
class Operators:
    """One callable an operator; signatures and shapes are in each operator's spec."""

    kv_store: Callable[..., Any]
    index_pool: Callable[..., Any]
    index_select_prefill: Callable[..., Any]
    index_select_decode: Callable[..., Any]
    sparse_mla_prefill: Callable[..., Any]
    sparse_mla_decode: Callable[..., Any]
    short_conv_prefill: Callable[..., Any]
    short_conv_decode: Callable[..., Any]
    delta_gates: Callable[..., Any]
    gated_norm: Callable[..., Any]
    gated_delta_prefill: Callable[..., Any]
    gated_delta_decode: Callable[..., Any]
    hc_pre_norm: Callable[..., Any]
    hc_post: Callable[..., Any]
    select_experts: Callable[..., Any]
    permute_rows: Callable[..., Any]
    unpermute_rows: Callable[..., Any]
    swiglu: Callable[..., Any]
    expert_gemm: Callable[..., Any]
    mxfp4_expert_gemm: Callable[..., Any]
    mxfp4_to_fp8: Callable[..., Any]
    fp8_expert_gemm: Callable[..., Any]


def resolve_operators(
    device: torch.device, dtype: torch.dtype, backend: str | None = None
) -> tuple[Operators, tuple[registry.Resolved, ...]]:
    """All operators for a device and dtype, and what each was resolved to.

    `backend` asks for one backend by name; an operator that it refuses raises with the reason.
    """
    resolved = tuple(registry.resolve(field.name, device, dtype, backend=backend) for field in fields(Operators))
    return Operators(**{found.operator.name: found.fn for found in resolved}), resolved
