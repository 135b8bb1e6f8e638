"""Second definitions of residual mixing and quantising cache writes, one entry at a time, from the README formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Results = dict[str, Tensor]


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float, sinkhorn_iters: int
) -> Results:
    tokens, m, d = streams.shape
    post, comb, collapsed = streams.new_zeros(tokens, m), streams.new_zeros(tokens, m, m), streams.new_zeros(tokens, d)
    for t in range(tokens):
        flat = streams[t].reshape(-1)
        mixed = fn @ (flat / torch.sqrt((flat @ flat) / len(flat) + norm_eps))
        pre = 1 / (1 + torch.exp(-(mixed[:m] * scale[0] + base[:m]))) + hc_eps
        post[t] = 2 / (1 + torch.exp(-(mixed[m : 2 * m] * scale[1] + base[m : 2 * m])))
        matrix = torch.softmax((mixed[2 * m :] * scale[2] + base[2 * m :]).view(m, m), 1) + hc_eps
        matrix = matrix / (matrix.sum(0, keepdim=True) + hc_eps)
        for _ in range(sinkhorn_iters - 1):
            matrix = matrix / (matrix.sum(1, keepdim=True) + hc_eps)
            matrix = matrix / (matrix.sum(0, keepdim=True) + hc_eps)
        comb[t], collapsed[t] = matrix, pre @ streams[t]
    return {"post": post, "comb": comb, "collapsed": collapsed}


def hc_pre_norm(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    layer_norm_eps: float,
) -> Results:
    found = hc_pre(streams, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters)
    rows = [norm_weight * row / torch.sqrt(row @ row / len(row) + layer_norm_eps) for row in found.pop("collapsed")]
    return found | {"normed": torch.stack(rows) if rows else streams[:, 0]}


def hc_post(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Results:
    mixed = torch.zeros_like(streams)
    for t in range(len(streams)):
        for m in range(streams.shape[1]):
            mixed[t, m] = post[t, m] * out[t] + sum(comb[t, n, m] * streams[t, n] for n in range(streams.shape[1]))
    return {"mixed": mixed}


def attention_residual(
    sources: Tensor, query: Tensor, *, logit_scale: float, norm_eps: float, normed_values: bool
) -> Results:
    tokens, _, d = sources.shape
    out = sources.new_zeros(tokens, len(query), d)
    for t in range(tokens):
        units = [row / math.sqrt(float(row @ row) / d + norm_eps) for row in sources[t]]
        for q in range(len(query)):
            weights = [math.exp(logit_scale * float(query[q] @ unit)) for unit in units]
            for weight, unit, row in zip(weights, units, sources[t], strict=True):
                out[t, q] += weight / sum(weights) * (unit if normed_values else row)
    return {"out": out}


def _e4m3_value(bits: int) -> float:
    exponent, mantissa = bits >> 3, bits & 7
    return math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)


_MAGNITUDES = [_e4m3_value(bits) for bits in range(127)]


def _nearest(x: float) -> int:
    """Bits of the e4m3fn next to x; of two equally near ones the even."""
    bits = min(range(127), key=lambda b: (abs(_MAGNITUDES[b] - abs(x)), b & 1))
    return bits | (0x80 if math.copysign(1, x) < 0 else 0)


def _quantised(row: Tensor) -> tuple[list[int], list[int]]:
    """Bytes of the values and of the scale of one row; divisions in float32."""
    narrow = row.float()
    scale = torch.maximum(narrow.abs().max() / torch.tensor(448.0), torch.tensor(2.0**-126))
    bits = [_nearest(float(x / scale)) for x in narrow]
    return bits, scale.view(1).view(torch.uint8).tolist()


def latent_store_fp8(latents: Tensor, latent_cache: Tensor, slot_mapping: Tensor, *, value_dim: int) -> Results:
    for row, slot in zip(latents, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            parts = [_quantised(row[i : i + 128]) for i in range(0, value_dim, 128)]
            made = [b for bits, _ in parts for b in bits] + [b for _, scale in parts for b in scale]
            made += row[value_dim:].to(torch.bfloat16).view(torch.uint8).tolist()
            latent_cache[slot] = torch.tensor(made, dtype=torch.uint8)
    return {"latent_cache": latent_cache}


def index_key_store_fp8(keys: Tensor, key_cache: Tensor, key_slots: Tensor) -> Results:
    width = keys.shape[1]
    per_block = key_cache.shape[1] // (width + 4)
    for row, slot in zip(keys, key_slots.tolist(), strict=True):
        if slot >= 0:
            (block, i), (bits, scale) = divmod(slot, per_block), _quantised(row)
            key_cache[block, i * width : (i + 1) * width] = torch.tensor(bits, dtype=torch.uint8)
            at = per_block * width + 4 * i
            key_cache[block, at : at + 4] = torch.tensor(scale, dtype=torch.uint8)
    return {"key_cache": key_cache}


def latent_and_key_store_fp8(
    latents: Tensor,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    key_cache: Tensor,
    key_slots: Tensor,
    *,
    value_dim: int,
) -> Results:
    return latent_store_fp8(latents, latent_cache, slot_mapping, value_dim=value_dim) | index_key_store_fp8(
        keys, key_cache, key_slots
    )


DEFINED: Mapping[str, Callable[..., Results]] = {
    fn.__name__: fn
    for fn in (
        hc_pre,
        hc_pre_norm,
        hc_post,
        attention_residual,
        latent_store_fp8,
        index_key_store_fp8,
        latent_and_key_store_fp8,
    )
}
