"""flash-linear-attention: chunked and recurrent gated delta rule, and attention over earlier residuals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from day0.bench.ops.gated_delta import SCALE, flops_of
from day0.bench.ops.peers import residuals
from day0.bench.ops.peers.peer import Peer, installed, load
from day0.bench.ops.peers.raw_delta import LIMIT, LOWER_BOUND, RawInputs, Size, rates
from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for

MODULE = "fla"
_RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def chunked(size: Size, name: str) -> Shape:
    """Prefill; the log gate of a head is computed before for GDN, whose kernel does not."""
    log_rate, bias = rates()
    made = RawInputs(size, log_rate, bias)
    common: dict[str, Any] = {"scale": SCALE, "output_final_state": True, "cu_seqlens": made.bounds}
    if size.channels:
        chunk = partial(load("fla.ops.kda").chunk_kda, made.q, made.k, made.v, made.raw, made.raw_beta)
        common |= _RAW | {"A_log": log_rate, "dt_bias": bias.view(-1), "safe_gate": True, "lower_bound": LOWER_BOUND}
    else:
        beta = made.raw_beta.float().sigmoid().bfloat16()
        rule = load("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        chunk = partial(rule, made.q, made.k, made.v, made.scalar_gates, beta, use_qk_l2norm_in_kernel=True)
    flops = flops_of(size.sequences * size.tokens, decode=False)
    calls = [lambda: chunk(**common)[0]]
    return Shape("gated_delta_prefill", name, calls, made.size_bytes, made.error, LIMIT, flops)


def recurrent(size: Size, name: str) -> Shape:
    """Decode; the new state is another tensor than the old."""
    log_rate, bias = rates()
    made = RawInputs(size, log_rate, bias)
    sets = [made, *(RawInputs(size, log_rate, bias) for _ in range(sets_for(made.size_bytes) - 1))]
    step = partial(
        load("fla.ops.kda").fused_recurrent_kda,
        A_log=log_rate,
        dt_bias=bias.view(-1),
        scale=SCALE,
        output_final_state=True,
        lower_bound=LOWER_BOUND,
        **_RAW,
    )
    return Shape(
        "gated_delta_decode",
        name,
        [partial(step, one.q, one.k, one.v, one.raw, one.raw_beta, initial_state=one.state) for one in sets],
        made.size_bytes,
        lambda found: made.error(*found),
        LIMIT,
        flops_of(size.sequences, decode=True),
    )


def attention_residual(size: residuals.Size, name: str) -> Shape:
    """One query over the sources, each given as a tensor of its own."""
    fused = load("fla.ops.attnres").fused_attnres
    made = residuals.Sources(size)

    def call(sources: Tensor) -> Tensor:
        out: Tensor = fused(made.query, list(sources.unbind(0)), made.one)
        return out

    return made.shape(name, call)


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of the gated delta rule, and of AttnRes."""
    if not installed(MODULE):
        return
    # With bfloat16 gates of ours it would be the same run again.
    size = None if "bf16 gates" in shape else Size.of(shape)
    if operator == "gated_delta_prefill" and size is not None:
        function = "chunk_kda" if size.channels else "chunk_gated_delta_rule"
        yield Peer(MODULE, function, partial(chunked, size, shape), "bf16 gates, activated inside")
    if operator == "gated_delta_decode" and size is not None and size.channels:
        yield Peer(MODULE, "fused_recurrent_kda", partial(recurrent, size, shape), "bf16 gates, activated inside")
    # At 7,168 its 24 configurations compile for minutes.
    sources = residuals.Size.of_sources(operator, shape)
    if sources is not None and sources.hidden <= 4096:
        yield Peer(MODULE, "fused_attnres", partial(attention_residual, sources, shape))
