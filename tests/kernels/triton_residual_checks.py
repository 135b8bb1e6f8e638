"""Checks of residual mixing and quantising cache writes under Triton's interpreter, a line of JSON for each.

A process of its own (`TRITON_INTERPRET=1 python -m tests.kernels.triton_residual_checks`), because Triton decides when
it is imported whether it interprets. `test_triton_residual.py` starts it and says which checks are asked for.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from day0_kernels.attention_residual.triton import attention_residual
from day0_kernels.comparison import same_bits
from day0_kernels.fp8_cache_write import reference as write_reference
from day0_kernels.fp8_cache_write import triton as write
from day0_kernels.hyper_connection import triton as hyper
from day0_kernels.hyper_connection.triton import hc_post, hc_pre, hc_pre_norm
from tests.kernels.check_process import answer_checks
from tests.kernels.triton_interpreted import check_case, check_neighbours

_MIXING: dict[str, Any] = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 3}
_ATTENDING: dict[str, Any] = {"logit_scale": 1.0, "norm_eps": 1e-6, "normed_values": False}


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mixing(tokens: int, streams: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = (2 + streams) * streams
    x = _normal(tokens, streams, width).bfloat16()
    return x, _normal(outputs, streams * width, seed=1), _normal(outputs, seed=2), _normal(3, seed=3)


def check_sizes() -> None:
    """Weights prepared or not, larger tiles or smaller, alone or among others: a token has the same bits."""
    x, fn, base, scale = _mixing(130, 4, 160)

    def call(streams: Tensor) -> tuple[Tensor, ...]:
        norm = torch.ones(160).to(x.dtype)
        return hc_pre_norm(streams, fn, base, scale, norm, **_MIXING, layer_norm_eps=1e-6)

    tiles = {"CHAINED": 0, "BLOCK_T": 64, "BLOCK_K": 64, "STAGES": 2}
    with mock.patch.object(hyper, "configuration", lambda *_: {"SPLIT": 1, **tiles, "BLOCK_T": 128}):
        whole = call(x)
    with mock.patch.object(hyper, "configuration", lambda *_: {"SPLIT": 0, **tiles}):
        assert all(same_bits(a, b) for a, b in zip(call(x), whole, strict=True))
    for t in (0, 63, 64, 129):
        assert all(same_bits(a, b[t : t + 1]) for a, b in zip(call(x[t : t + 1]), whole, strict=True)), t


def check_broken_token(name: str) -> None:
    """A NaN stays in its own token."""
    x, fn, base, scale = _mixing(9, 4, 32)
    x[4, 1, 3] = torch.nan
    found: tuple[Tensor, ...]
    if name == "hc_pre":
        found = hc_pre(x, fn, base, scale, **_MIXING)
    elif name == "hc_pre_norm":
        found = hc_pre_norm(x, fn, base, scale, torch.ones(32).bfloat16(), **_MIXING, layer_norm_eps=1e-6)
    elif name == "hc_post":
        found = (hc_post(x, x[:, 0].contiguous(), torch.ones(9, 4), torch.ones(9, 4, 4)),)
    else:
        found = (attention_residual(x, _normal(1, 32), **_ATTENDING),)
    for result in found:
        assert result.flatten(1).isnan().any(1).nonzero().flatten().tolist() == [4]
    assert name == "hc_post" or all(result[4].isnan().all() for result in found[-1:])


def check_bank() -> None:
    """A view of a larger bank, sources first, gives the bits of the same rows in a tensor of their own."""
    bank = torch.full((7, 5, 48), torch.nan)
    bank[:4] = _normal(4, 5, 48)
    query = _normal(2, 48, seed=1)
    seen = bank[:4].transpose(0, 1)
    assert not seen.is_contiguous()
    got = attention_residual(seen, query, **_ATTENDING)
    assert got.isfinite().all() and same_bits(got, attention_residual(seen.contiguous(), query, **_ATTENDING))
    assert same_bits(got, attention_residual(seen.mT.contiguous().mT, query, **_ATTENDING))


def _same_writes(rows: Tensor) -> None:
    """Ours and the reference's bytes of `rows [N, 256]` as latents and as index keys, with slots at both ends."""
    slots = torch.randperm(len(rows) + 1, generator=torch.Generator().manual_seed(len(rows)))[: len(rows)].int()
    slots[1::5] = -1
    caches = [torch.full((len(rows) + 1, 264), 0xAA, dtype=torch.uint8) for _ in range(2)]
    keys = [torch.full((1, (len(rows) + 1) * 260), 0xAA, dtype=torch.uint8) for _ in range(2)]
    for module, cache, key_cache in zip((write, write_reference), caches, keys, strict=True):
        module.latent_store_fp8(rows, cache, slots, value_dim=256)
        module.index_key_store_fp8(rows, key_cache, slots)
    assert torch.equal(*caches), (caches[0] != caches[1]).nonzero()[:3].tolist()
    assert torch.equal(*keys), (keys[0] != keys[1]).nonzero()[:3].tolist()


def check_every_bfloat16() -> None:
    """All codes, with their neighbours in size and with others: NaN, infinite, subnormal and zero among them."""
    codes = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(256, 256)
    _same_writes(codes)
    _same_writes(codes.masked_fill(~codes.isfinite(), 0).T.contiguous())
    _same_writes(torch.zeros(2, 256).bfloat16())


def check_halfway() -> None:
    """Under a scale of exactly 1: every place halfway between two e4m3 codes, and one float32 to each side of it."""
    codes = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    half = (codes[1:] + codes[:-1]) / 2
    around = torch.cat((half, half.nextafter(torch.tensor(torch.inf)), half.nextafter(torch.tensor(0.0)), codes))
    # Every group of 128 begins with the largest value, which makes its scale 1.
    groups = torch.nn.functional.pad(around, (0, -len(around) % 127)).view(-1, 127)
    groups = torch.cat((torch.full((len(groups), 1), 448.0), groups), 1)
    rows = torch.cat((groups, -groups), 1)
    _same_writes(rows)
    bits, scale = write_reference.quantised(rows.view(-1, 128))
    assert (scale == 1).all() and len(set(bits.flatten().tolist())) == 254


def check_refused() -> None:
    """What the kernels cannot do is an error that names the field, the limit and the value."""
    row = torch.zeros(1, 130)
    for call, words in (
        (lambda: hc_pre(*_mixing(1, 3, 8), **_MIXING), "M must be 2 or 4, is 3"),
        (lambda: hc_pre(*_mixing(1, 2, 8193), **_MIXING), "D must be at most 8192, is 8193"),
        (lambda: attention_residual(_normal(1, 0, 8), _normal(1, 8), **_ATTENDING), "N must be at least 1, is 0"),
        (lambda: attention_residual(_normal(1, 1, 8), _normal(4, 8), **_ATTENDING), "Q must be 1 to 3, is 4"),
        (
            lambda: write.latent_store_fp8(row, row.byte(), torch.zeros(1).int(), value_dim=130),
            "value_dim must be a multiple of 128 up to 512, is 130",
        ),
        (
            lambda: write.latent_store_fp8(row, torch.zeros(2, 137).byte(), torch.zeros(1).int(), value_dim=128),
            "with 136 bytes a row for 130 columns",
        ),
        (lambda: write.index_key_store_fp8(row, row.byte(), torch.zeros(1).int()), "D must be a multiple of 4"),
    ):
        try:
            call()
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")


if __name__ == "__main__":
    answer_checks(
        {
            "case": check_case,
            "neighbours": check_neighbours,
            "sizes": check_sizes,
            "broken": check_broken_token,
            "bank": check_bank,
            "every_bfloat16": check_every_bfloat16,
            "halfway": check_halfway,
            "refused": check_refused,
        }
    )
