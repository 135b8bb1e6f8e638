"""flash-attn-res: the first phase of AttnRes, one query over the sources."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from day0.bench.ops.peers import residuals
from day0.bench.ops.peers.peer import Peer, installed, load
from day0.bench.ops.shape import Shape

MODULE = "flash_attn_res"


def attention_residual(size: residuals.Size, name: str) -> Shape:
    """Queries are a batch of one."""
    phase, made = load(MODULE).phase_1_batched_attention_triton_op, residuals.Sources(size)

    def call(sources: Tensor) -> Tensor:
        out: Tensor = phase(sources[:, None], made.query[None], residuals.EPS)[0]
        return out

    return made.shape(name, call)


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of AttnRes."""
    size = residuals.Size.of_sources(operator, shape)
    if installed(MODULE) and size is not None:
        yield Peer(MODULE, "phase_1_batched_attention", partial(attention_residual, size, shape))
