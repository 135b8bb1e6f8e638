"""FlashKDA's forward pass, for prefill and, padded to its chunk of 16, for decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.gated_delta import SCALE, flops_of
from day0.bench.ops.peers.peer import Peer, installed, load
from day0.bench.ops.peers.raw_delta import LIMIT, LOWER_BOUND, RawInputs, Size, rates
from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for

MODULE = "flash_kda"


def forward(operator: str, size: Size, name: str) -> Shape:
    """States are `[B, H, V, K]` there: they are turned before."""
    log_rate, bias = rates()
    made, run = RawInputs(size, log_rate, bias), load(MODULE).fwd
    decode = size.tokens == 1
    count = sets_for(made.size_bytes) if decode else 1
    sets = [made, *(RawInputs(size, log_rate, bias) for _ in range(count - 1))]

    def call(one: RawInputs, out: Tensor, before: Tensor | None, after: Tensor) -> tuple[Tensor, Tensor]:
        inputs, gates = (one.q, one.k, one.v, one.raw, one.raw_beta), (log_rate, bias, LOWER_BOUND)
        run(*inputs, SCALE, out, *gates, before, after, one.bounds)
        return out, after.mT

    calls = [
        partial(
            call,
            one,
            torch.full_like(one.v, torch.nan),
            one.state.mT.contiguous() if decode else None,
            torch.empty_like(one.state),
        )
        for one in sets
    ]

    def error(found: tuple[Tensor, Tensor]) -> float:
        return made.error(*found) if decode else made.error(found[0])

    flops = flops_of(size.sequences * size.tokens, decode=decode)
    return Shape(operator, name, calls, made.size_bytes, error, LIMIT, flops)


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of KDA."""
    size = None if "bf16 gates" in shape else Size.of(shape)
    if not installed(MODULE) or size is None or not size.channels:
        return
    note = "bf16 gates, activated inside" + ("; padded to 16 tokens" if size.tokens == 1 else "")
    if operator in ("gated_delta_prefill", "gated_delta_decode"):
        yield Peer(MODULE, "fwd", partial(forward, operator, size, shape), note)
